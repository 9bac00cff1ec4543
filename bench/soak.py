"""Measures how much memory Sentinel holds in a training process, over many steps.

    python -m bench.soak                     # 100,000 steps, 1,000 tensors; some minutes
    python -m bench.soak --steps 20000

A loop of 1,000 small tensors, first bare, then watched with default settings by a real daemon. Bars: a resident set at
most 16 MB larger than bare, and no growth after the first tenth of the steps (1 MB is allowed, for the C library's
free lists). Part of it is code of PyTorch that only Sentinel calls, shared by a node's ranks; `own_mb` is the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

TENSORS = 1000
BARE_STEPS = 2000
BARS = {"held_mb": 16.0, "grown_mb": 1.0}
LOOKS = 20


def loop() -> tuple[object, object, Callable[[], None]]:
    """Return (model, optimizer, step). All gradients exist at each step; its backward pass replaces two of them."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(TENSORS)])
    learns, stands = [model[0], model[-1]], list(model)[1:-1]
    optimizer = torch.optim.SGD([{"params": learns, "lr": 0.01}, {"params": stands, "lr": 1e-6}])
    for parameter in stands:
        parameter.grad = torch.randn(4, 4)

    def step() -> None:
        for parameter in learns:
            parameter.grad = None
        sum((parameter - 3.0 - 0.1 * torch.randn(4, 4)).square().mean() for parameter in learns).backward()
        optimizer.step()

    return model, optimizer, step


class Memory(NamedTuple):
    """MB of this process."""

    resident: float
    own: float
    """Resident memory that is not shared: not backed by a file."""


def memory() -> Memory:
    """Return this process's memory after a garbage collection."""
    gc.collect()
    used = psutil.Process().memory_info()
    return Memory(used.rss / 1e6, (used.rss - used.shared) / 1e6)


def measure_memory(steps: int) -> dict[str, float]:
    """Return the resident set of the bare loop, and how the watched loop's, taken `LOOKS` times, differs from it."""
    import sentinel

    model, optimizer, step = loop()
    for _ in range(BARE_STEPS):
        step()
    bare, looks = memory(), list[Memory]()
    begin = time.perf_counter()
    with sentinel.attach(model, optimizer, run="soak") as monitor:
        for number in range(steps):
            step()
            if (number + 1) % (steps // LOOKS) == 0:
                looks.append(memory())
                more = looks[-1].resident - bare.resident, looks[-1].own - bare.own
                print("{} steps: {:.1f} MB more than bare, {:.1f} own".format(number + 1, *more), file=sys.stderr)
        state = monitor.state
    if state != "streaming":
        sys.exit(f"the daemon was not there at the end: {state}")
    settled = looks[LOOKS // 10 - 1].resident
    return {
        "steps": steps, "seconds": time.perf_counter() - begin, "bare_mb": bare.resident,
        "held_mb": max(looks).resident - bare.resident, "own_mb": max(look.own for look in looks) - bare.own,
        "grown_mb": looks[-1].resident - settled,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SENTINEL_RUNTIME": f"{folder}/r", "SENTINEL_STATE": f"{folder}/s"}
        os.environ["SENTINEL_CONFIG"] = f"{folder}/sentinel.toml"
        Path(os.environ["SENTINEL_CONFIG"]).write_text("[daemon]\nhttp = 0\n")
        result = measure_memory(options.steps)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print("{steps:.0f} steps in {seconds:.0f} s; {bare_mb:.0f} MB bare".format(**result))
        print(f"own_mb     {result['own_mb']:7.2f}")
        for name, bar in BARS.items():
            print(f"{name:<10} {result[name]:7.2f}  bar {bar:g}  " + ("held" if result[name] <= bar else "MISSED"))
    sys.exit(any(result[name] > bar for name, bar in BARS.items()))


if __name__ == "__main__":
    main()
