"""What Sentinel costs, at default settings, with the real daemon on the same cores.

    python bench/overhead.py [--blocks 20] [--loop small|gpt|wide ...]

Two processes train the same model: one watched, one with SENTINEL_DISABLED=1. They take turns, block by block (A B A
B ...), so that a drift of the machine meets both. Printed for each loop:

    wall      median of the paired ratios of wall time, watched over bare, with its quartiles
    cpu       the same for accounted CPU: the training process (hooks and sender in it) and the daemon
    own       what the hooks themselves account (Batch.cost), as `sentinel status` shows it
    floor     one read of all gradients (sum over a buffer of their size), as a share of a bare step

Bars: own cost at most 1 % on gpt and wide, 3 % on small (DESIGN, section 12). Two identical loops differ by 1 to 3 %
in wall time on a shared machine: below that, believe the accounted CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

STEPS = {"small": 250, "gpt": 6, "wide": 5}
"""Steps of one block: about a second."""


def trainee(name: str) -> None:
    """A training process: a block of steps for each line on stdin."""
    import torch

    import sentinel
    from sentinel.cli.client import all_asked

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = loop(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sentinel.attach(model, optimizer, run=f"bench-{name}")
    shape = model(batch).shape
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for command in sys.stdin:
        begin, used = time.perf_counter(), time.process_time()
        for _ in range(STEPS[name]):
            # New targets at each step: a loss that is memorised to the last bit looks odd, and is watched closely.
            (model(batch) - torch.randn(shape)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        wall, cpu = time.perf_counter() - begin, time.process_time() - used
        begin = time.perf_counter()
        gradients.sum()
        floor = time.perf_counter() - begin
        answer: dict[str, Any] = {"wall": wall, "cpu": cpu, "floor": floor * STEPS[name] / wall}
        if command.strip() == "last" and "SENTINEL_DISABLED" not in os.environ:
            (rank,) = all_asked("status")[0]["runs"][0]["ranks"]
            answer |= {"own": rank["cost"], "spacing": rank["spacing"], "dropped": rank["dropped"]}
        print(json.dumps(answer), flush=True)


def loop(name: str) -> tuple[Any, Any]:
    """Model and batch of one of the three loops."""
    import torch
    from torch import nn

    if name == "small":  # 100 layers of weight and bias: the worst case for a hook
        layers = [nn.Linear(32, 32) for _ in range(100)]
        for layer in layers:  # else activations fade to subnormal numbers, which are ten times as slow
            nn.init.orthogonal_(layer.weight)
        return nn.Sequential(*layers), torch.randn(16, 32)
    if name == "wide":  # 50 M parameters
        widths = [1024, *[3520] * 4, 1024]
        return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)]), torch.randn(16, 1024)
    block = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, norm_first=True, dropout=0.0)
    return nn.TransformerEncoder(block, 6, enable_nested_tensor=False), torch.randn(4, 64, 384)  # 10.6 M parameters


class Trainee:
    """One training process, from outside."""

    def __init__(self, name: str, places: Path, *, disabled: bool) -> None:
        own = {"SENTINEL_RUNTIME": str(places / "run"), "SENTINEL_STATE": str(places / "state")}
        environment = {**os.environ, **own, **({"SENTINEL_DISABLED": "1"} if disabled else {})}
        command = [sys.executable, __file__, "--trainee", name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def block(self, command: str = "go") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before = self._daemon_seconds()
        print(command, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        answer["cpu"] += self._daemon_seconds() - before
        return answer

    def end(self) -> None:
        self._process.communicate()

    def _daemon_seconds(self) -> float:
        return sum(sum(child.cpu_times()[:2]) for child in _daemons(self._process.pid))


def _daemons(pid: int) -> Iterator[psutil.Process]:
    yield from (child for child in psutil.Process(pid).children() if "daemon" in child.cmdline())


def measured(name: str, blocks: int) -> None:
    with tempfile.TemporaryDirectory() as places:
        watched = Trainee(name, Path(places), disabled=False)
        bare = Trainee(name, Path(places), disabled=True)
        for _ in range(3):  # caches, the daemon's start, the first decisions of the governor
            watched.block(), bare.block()
        pairs = [(watched.block(), bare.block()) for _ in range(blocks)]
        last = watched.block("last")
        watched.end(), bare.end()
    step = statistics.median(b["wall"] for _, b in pairs) / STEPS[name] * 1000
    floor = statistics.median(b["floor"] for _, b in pairs)
    print(f"{name:<6} step {step:6.1f} ms  ", end="")
    for what in ("wall", "cpu"):
        ratios = [a[what] / b[what] for a, b in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{what} {middle:.3f} [{low:.3f}, {high:.3f}]  ", end="")
    spacing = ", ".join(f"tier {tier} every {k}" for tier, k in sorted(last["spacing"].items()))
    print(f"own {last['own']:.2%}  floor {floor:.2%}  ({spacing}; {last['dropped']} dropped)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--loop", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--trainee", choices=list(STEPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainee:
        trainee(options.trainee)
        return
    for name in options.loop:
        measured(name, options.blocks)


if __name__ == "__main__":
    main()
