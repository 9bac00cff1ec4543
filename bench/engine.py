"""Measures what the rule engine costs, and how soon it decides; prints a table for docs/performance.md.

    python -m bench.engine                    # about a minute
    python -m bench.engine --ranks 64 --steps 200

One process, its own CPU time. Parts:

    many ranks      R ranks report each step, 40 scalars each, memory and 50 layers at every 16th, judged by the stock
                    rules: CPU time of a step (at 1 step/s the share of a core) and of the decision
    one process     a step of tiers 0 and 1: microseconds, and samples per second on one core
    many layers     the same with tier 2: 200 layers at each step, as with overhead=1.0
    a long run      100,000 steps of loss and gradient norm through `sentinel rules backtest`
    memory          bytes of the rules' state per series (one metric of one entity that a rule reads)
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sentinel.engine import RUN, Entity, Evaluator, Observation, Table
from sentinel.rulebook import loader
from sentinel.signals import SIGNALS

LAYERS = 50
TABLE = 200
"""Layers in the part that samples all of them at each step: the tensors of bench/overhead.py's small loop."""
SCALARS = 40
COMBINED = {"mean": statistics.fmean, "sum": sum, "max": max, "min": min, "any": max, "norm": max}


def scalars(tiers: set[int]) -> list[str]:
    """Return the names of the rank signals in these tiers."""
    return [s.name for s in SIGNALS.values() if s.scope == "rank" and s.tier in tiers and s.name != "fp16"]


def value(name: str, generator: random.Random) -> float:
    """Return a value of this signal as a healthy run has it."""
    if name == "step_skipped":
        return 0.0
    if "bytes" in name:
        return 4e9
    return 1.0 + 0.01 * generator.random()


def observation(seq: int, ranks: int, generator: random.Random) -> Observation:
    """Return a closed step of all ranks, memory and layers at every 16th; logged values fill up to `SCALARS`."""
    names = scalars({0, 1, 2} if seq % 16 == 0 else {0, 1})
    logged = {f"logged_{i}": 1.0 for i in range(SCALARS - len(names))} if ranks > 1 else {}
    values: dict[Entity, dict[str, float]] = {}
    for rank in range(ranks):
        values[Entity("rank", str(rank))] = {name: value(name, generator) for name in names} | logged
    values[RUN] = {
        name: COMBINED[SIGNALS[name].combine]([of[name] for of in values.values() if name in of]) for name in names
    }
    if seq % 16 == 0:
        for layer in range(LAYERS):
            values[Entity("layer", f"block.{layer}.weight")] = {
                s.name: value(s.name, generator) for s in SIGNALS.values() if s.scope == "layer" and s.tier == 2
            } | {"layer_nonfinite": 0.0}
    return Observation(seq, float(seq), values)


def judge_steps(evaluator: Evaluator, steps: Iterator[Observation]) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of each decision, and of the work put off until the second after it.

    Making the samples is not counted.
    """
    decided, after = [], []
    for step in steps:
        begin = time.process_time()
        evaluator.observe(step)
        between = time.process_time()
        evaluator.judge_deferred()  # as a daemon does, once a second
        decided.append(between - begin)
        after.append(time.process_time() - between)
    return decided, after


def many_ranks(ranks: int, steps: int) -> tuple[float, float, float, float]:
    """Return (CPU seconds per step, median and 99th percentile of the decision's, bytes per series)."""
    generator = random.Random(1)
    evaluator = Evaluator(loader.stock_rules(), run="bench")
    warm = 70
    judge_steps(evaluator, (observation(seq, ranks, generator) for seq in range(warm)))
    used, after = judge_steps(evaluator, (observation(seq, ranks, generator) for seq in range(warm, warm + steps)))
    gc.collect()
    before = resident()
    state, _ = evaluator.save_state()
    other = Evaluator(loader.stock_rules(), run="bench")
    other.restore(state, [], [])
    del state
    gc.collect()
    read = {metric for rule in loader.stock_rules() for metric in rule.metrics} & set(scalars({0, 1, 2}))
    series = len(read) * (ranks + 1)
    cuts = statistics.quantiles(used, n=100)
    return (
        statistics.fmean(used) + statistics.fmean(after),
        statistics.median(used),
        cuts[98],
        max(resident() - before, 0) / series,
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def one_process(steps: int) -> tuple[float, int]:
    """Return (CPU seconds per step, samples in a step)."""
    generator = random.Random(1)
    evaluator = Evaluator(loader.stock_rules(), run="bench")
    judge_steps(evaluator, (observation(seq, 1, generator) for seq in range(300)))
    used, _ = judge_steps(evaluator, (observation(seq, 1, generator) for seq in range(300, 300 + steps)))
    return statistics.fmean(used), len(scalars({0, 1}))


def many_layers(steps: int) -> float:
    """Return the CPU seconds of a step with statistics of all layers."""
    generator = random.Random(1)
    entities = tuple(Entity("layer", f"layers.{layer}.weight") for layer in range(TABLE))
    names = scalars({0, 1, 2})

    def make_step(seq: int) -> Observation:
        columns = {s.name: array("f", [0.0] * TABLE) for s in SIGNALS.values() if s.scope == "layer" and s.tier == 2}
        columns["layer_grad_norm"] = array("f", [value("layer_grad_norm", generator) for _ in entities])
        values = {name: value(name, generator) for name in names}
        return Observation(seq, float(seq), {RUN: values, Entity("rank", "0"): values}, Table(entities, columns))

    evaluator = Evaluator(loader.stock_rules(), run="bench")
    judge_steps(evaluator, (make_step(seq) for seq in range(300)))
    used, after = judge_steps(evaluator, (make_step(seq) for seq in range(300, 300 + steps)))
    return statistics.fmean(used) + statistics.fmean(after)


def long_run(steps: int) -> tuple[float, float]:
    """Return the (wall, CPU) seconds of `sentinel rules backtest` over this many steps."""
    generator = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.jsonl"
        with path.open("w") as file:
            for step in range(steps):
                loss = 2 + 2 * 0.9999**step + generator.gauss(0, 0.05)
                file.write(json.dumps({"step": step, "loss": loss, "grad_norm": abs(generator.gauss(1, 0.2))}) + "\n")
        begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "sentinel", "rules", "backtest", str(path), "--json"],
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description="What the rule engine costs, and how soon it has decided.")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--long", type=int, default=100_000)
    asked: Any = parser.parse_args()
    print("| what | figure |\n| --- | --- |")
    step, samples = one_process(5000)
    print(f"| one process: a step of {samples} samples, {len(loader.stock_rules())} rules | {step * 1e6:.0f} us |")
    print(f"| samples on one core | {samples / step:,.0f} a second |")
    print(f"| the same with statistics of {TABLE} layers | {many_layers(2000) * 1e6:.0f} us |")
    share, median, slow, size = many_ranks(asked.ranks, asked.steps)
    print(f"| {asked.ranks:,} ranks at 1 step/s, {SCALARS} scalars each | {share:.1%} of a core |".replace("%", " %"))
    print(f"| CPU time of a decision there: median, 99 of 100 | {median * 1e3:.1f} ms, {slow * 1e3:.1f} ms |")
    print(f"| state of the rules, a series | {size:,.0f} bytes |")
    wall, used = long_run(asked.long)
    print(f"| `rules backtest` of {asked.long:,} steps | {wall:.1f} s ({used:.1f} s of CPU) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
