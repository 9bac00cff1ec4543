"""Measures alerts on small reinforcement learning runs at default settings, healthy and with faults planted half-way.

    python -m bench.reinforcement                     # 5 seeds; some 20 minutes on two idle cores
    python -m bench.reinforcement --seeds 1 --only DQN --plant none nan
    python -m bench.reinforcement --only --write      # measure nothing, put what is kept into docs/detection.md

Every run is a process of its own, with a daemon of its own. Bars: no critical alarm in a healthy run, and every planted
fault is reported (a warning or a critical alert at or after its step). A leak has 2 GB to fill (`ulimit -v`). A hang
lasts for 12 s, and a rule of the bench fires after 3: the stock limit of a single process is 8 minutes. GRPO is TRL's
trainer with a model of two layers; it is left out where TRL is not installed. The exit status is 1 if a bar is missed.
Results are kept in build/reinforcement.json, and the command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import math
import os
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.pages import BUILD, DOCS, make_table, write_section
from bench.places import ANY_PORT, list_incidents, make_places
from tests.programs.balancing import LEARNERS, Loop

KEPT = BUILD / "reinforcement.json"
MARKS = "<!-- reinforcement -->", "<!-- end of reinforcement -->"
HEAD = ("learner", "fault", "as it should be", "alerts (in how many runs)")
STEPS = 2000
PLANTED_STEPS = 800
GRPO_STEPS = 160
OPTIMIZERS = {"SAC": 2}
"""Number of optimizers that share a learner's steps, where it is not 1: an alert names its own optimizer's step."""
FREE = 2e9
LEAK = 8e8
"""Bytes that a leak keeps by the end of a run: 2 MB per step, in GRPO's shorter run 10 MB."""
HANG_SECONDS = 12
SOON = """
group: soon
rules:
  - {override: Hang, expr: stalled_seconds > 3}
"""


class Planted:
    """A fault that begins at a step."""

    def __init__(self, kind: str, onset: int) -> None:
        self._kind, self._onset = kind, onset
        self._held: list[torch.Tensor] = []

    def spoil(self, step: int, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
        """Plant the fault, if it is due, before the backward pass of a step; return the loss to use."""
        if self._kind == "leak" and step >= self._onset:
            self._held.append(torch.ones(int(LEAK / 4 / self._onset)))  # as many steps follow the onset
        if step != self._onset:
            return loss
        if self._kind == "leak":
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (int(used + FREE), resource.RLIM_INFINITY))
        if self._kind == "hang":
            select.select([os.pipe()[0]], [], [], HANG_SECONDS)
        if self._kind == "rate":
            for group in optimizer.param_groups:
                group["lr"] *= 100
        if self._kind == "state":
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()
        return loss * math.nan if self._kind == "nan" else loss


PLANTS = ("none", "nan", "rate", "state", "hang", "leak")


class SpoiltLoop(Loop):
    """A loop whose optimizer steps have the planted fault."""

    def __init__(self, log: Callable[..., None], planted: Planted) -> None:
        super().__init__(log)
        self._planted = planted

    def optimize(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, **numbers: float) -> None:
        super().optimize(optimizer, self._planted.spoil(len(self.rows), optimizer, loss), **numbers)


def count_steps(name: str, kind: str) -> int:
    """Return the steps of a run: more if it is healthy, or if samples of tier 3 are needed before the fault."""
    if name == "GRPO":
        return GRPO_STEPS
    return STEPS if kind in ("none", "state") else PLANTED_STEPS


def run_learner(name: str, seed: int, kind: str) -> None:
    """Run one learner to its end, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    steps = count_steps(name, kind)
    planted = Planted(kind, steps // 2)
    if name == "GRPO":
        return run_grpo(seed, steps, planted)
    import sentinel

    model, optimizers, train = LEARNERS[name](seed, steps)
    with sentinel.attach(model, optimizers, run="rl") as monitor, contextlib.suppress(ValueError, RuntimeError):
        # A policy of NaN raises when an action is drawn, and a leak ends in a failed allocation.
        train(SpoiltLoop(monitor.log, planted))


def run_grpo(seed: int, steps: int, planted: Planted) -> None:
    """Run group-relative policy optimisation, whose reward is the share of the letter "a" in a completion."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    from sentinel.hooks.transformers import SentinelCallback

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            return planted.spoil(self.state.global_step, self.optimizer.optimizer, super().compute_loss(*given, **more))

    transformers.set_seed(seed)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *"abcdefghij "])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=32, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    prompts = datasets.table.InMemoryTable.from_pydict({"prompt": ["a b", "b c", "c d", "d e"] * 500})
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=transformers.GPT2LMHeadModel(config),
            reward_funcs=lambda completions, **_: [text.count("a") / max(len(text), 1) for text in completions],
            args=trl.GRPOConfig(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=8, num_generations=4, seed=seed,
                max_completion_length=8, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
                use_cpu=True, bf16=False, learning_rate=1e-3,
            ),
            train_dataset=datasets.Dataset(prompts, fingerprint="prompts"),
            processing_class=tokenizer,
            callbacks=[SentinelCallback(run="rl")],
        ).train()  # fmt: skip


def measure_run(name: str, seed: int, kind: str) -> list[dict[str, Any]]:
    """Run one learner in a process of its own; return its alerts (from the history), with their delays in steps."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | make_places(Path(folder), ANY_PORT)
        if kind == "hang":
            (Path(folder) / "soon.yaml").write_text(SOON)
            environment["SENTINEL_RULES"] = f"{folder}/soon.yaml"
        command = [sys.executable, "-m", "bench.reinforcement", "--child", name, str(seed), kind]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode and kind in ("none", "rate"):
            sys.exit(f"{name} {seed} {kind}: {ended.stderr[-2000:]}")
        incidents = list_incidents(environment)
    onset = count_steps(name, kind) // 2 // OPTIMIZERS.get(name, 1)
    onset -= kind == "hang"  # the step before the hang, which is the last that ended
    return [
        {"alert": one["alert"], "severity": one["severity"], "step": one["step"], "delay": one["step"] - onset}
        for one in incidents
    ]


def is_held(kind: str, alerts: list[dict[str, Any]]) -> bool:
    """Return whether a run meets its bar."""
    if kind == "none":
        return not any(one["severity"] == "critical" for one in alerts)
    return any(one["delay"] >= 0 and one["severity"] in ("warning", "critical") for one in alerts)


def list_rows(measured: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """Yield the rows of the page's table: by learner and fault, in how many seeds it held, and which alerts came."""
    runs = collections.defaultdict[tuple[str, str], list[list[dict[str, Any]]]](list)
    for key, alerts in measured.items():
        name, _, kind = key.split()
        runs[name, kind].append(alerts)
    for (name, kind), found in sorted(runs.items(), key=lambda run: (run[0][0], PLANTS.index(run[0][1]))):
        told = collections.Counter(
            f"{alert} ({severity})"
            for alerts in found
            for alert, severity in {(one["alert"], one["severity"]) for one in alerts if is_told(kind, one)}
        )
        held = sum(is_held(kind, alerts) for alerts in found)
        said = ", ".join(f"{alert}: {count}" for alert, count in told.most_common()) or "none"
        yield [name, kind, f"{held} of {len(found)}", said]


def is_told(kind: str, alert: dict[str, Any]) -> bool:
    return alert["severity"] != "info" and (kind == "none" or alert["delay"] >= 0)


def main() -> None:
    learners = [*LEARNERS, *(["GRPO"] if importlib.util.find_spec("trl") else [])]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=learners, default=learners)
    parser.add_argument("--plant", nargs="+", choices=PLANTS, default=PLANTS)
    parser.add_argument("--write", action="store_true", help="put what is kept into docs/detection.md")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, seed, kind = options.child
        return run_learner(name, int(seed), kind)
    measured = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in range(options.seeds):
        for name in options.only:
            for kind in options.plant:
                key = f"{name} {seed} {kind}"
                if key not in measured:
                    measured[key] = measure_run(name, seed, kind)
                    KEPT.parent.mkdir(exist_ok=True)
                    KEPT.write_text(json.dumps(measured))
                    print(key, "held" if is_held(kind, measured[key]) else "MISSED", measured[key], flush=True)
    if options.write:
        write_section(DOCS / "detection.md", MARKS, make_table(HEAD, list_rows(measured)))
    sys.exit(not all(is_held(key.split()[2], alerts) for key, alerts in measured.items()))


if __name__ == "__main__":
    main()
