"""Checks that weights are the same with and without Sentinel, and that GradScaler's actions are reported right.

Everything is sampled at every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu_checks import Line, equal
from bench.gpu_checks.loops import Loop, compare_states, deterministic, generators, settle, toy
from bench.gpu_checks.watched import statistics_by, watched


def check(device: str) -> Iterator[Line]:
    deterministic()
    steps = 24 if device == "cuda" else 6
    for name, (how, make) in _loops(device).items():
        bare, drawn = _run(make(), steps), generators(device)
        again = _run(make(), steps)
        with statistics_by(how), watched(seen := make(), every_step=True) as (daemon, _):
            scales = _scales(seen, steps)
            settle(device)
        yield compare_states(f"{name}: weights, optimizer", bare, again, seen)
        alike = all(map(torch.equal, drawn, generators(device)))
        yield Line(f"{name}: random generators", "the same" if alike else "different", alike)
        if seen.scaler is not None:
            skipped = [scales[at + 1] < scales[at] for at in range(steps)]
            told, scale = daemon.series("step_skipped"), daemon.series("loss_scale")
            yield equal(f"{name}: withheld steps told", [told.get(at) == 1.0 for at in range(steps)], skipped)
            yield equal(f"{name}: loss scale of each step", [scale.get(at) for at in range(steps)], scales[:-1])
            yield Line(f"{name}: steps that overflowed", str(sum(skipped)), 0 < sum(skipped) < steps, "some")


def _run(loop: Loop, steps: int) -> Loop:
    loop.run(steps)
    return loop


def _scales(loop: Loop, steps: int) -> list[float]:
    """Run the loop; return the loss scale before each step, and after the last."""
    found = []
    for _ in range(steps):
        found.append(loop.scaler.get_scale() if loop.scaler is not None else 0.0)
        loop.step()
    return [*found, loop.scaler.get_scale() if loop.scaler is not None else 0.0]


def _loops(device: str) -> dict[str, tuple[str, Callable[[], Loop]]]:
    """Return name -> (what takes the statistics, how the loop is made). Scales are so high that gradients overflow."""
    make = functools.partial(Loop, device, **toy(device))

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-4, fused=True)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 1e-3, momentum=0.9, nesterov=True)

    half, high = torch.float16, 2.0**28 if device == "cuda" else 2.0**22
    found = {
        "AdamW": functools.partial(make),
        "fused AdamW, bf16, clipped": functools.partial(make, half=torch.bfloat16, optimizer=fused, clip=0.5),
        "SGD, bf16 weights, accumulated": functools.partial(make, weights=torch.bfloat16, optimizer=sgd, accumulate=5),
        "dropout": functools.partial(make, dropout=0.2),
        "fp16 with a scaler": functools.partial(make, half=half, scale=high),
        "fp16, fused, with a scaler": functools.partial(make, half=half, scale=high, optimizer=fused),
    }
    loops = {name: ("eager", loop) for name, loop in found.items()}
    return loops | {f"{name}, Triton": ("Triton", loop) for name, loop in list(found.items())[1:2]}
