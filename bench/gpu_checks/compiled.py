"""Checks torch.compile on the device: with Sentinel no more graph breaks, graphs and recompilations than without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import counters

from bench.gpu_checks import Line
from bench.gpu_checks.loops import Loop, compare_states, deterministic, settle, toy
from bench.gpu_checks.watched import watched

STEPS = 6


def check(device: str) -> Iterator[Line]:
    deterministic()
    backend = "inductor" if device == "cuda" else "eager"
    ways: dict[str, Callable[[Loop], None]] = {
        "model": lambda loop: setattr(loop, "model", torch.compile(loop.model, backend=backend)),
        "optimizer": lambda loop: setattr(loop.optimizer, "step", torch.compile(loop.optimizer.step, backend=backend)),
    }
    for name, way in list(ways.items())[: len(ways) if device == "cuda" else 1]:
        (bare, without), (again, _) = (_run(device, way, watch=False) for _ in range(2))
        seen, found = _run(device, way, watch=True)
        more = any(one > other for one, other in zip(found, without, strict=True))
        what = f"{name}: graph breaks, graphs, recompilations"
        yield Line(what, f"{found} against {without} without", not more, "no more")
        yield compare_states(f"{name}: weights", bare, again, seen)


def _run(device: str, way: Callable[[Loop], None], *, watch: bool) -> tuple[Loop, tuple[int, ...]]:
    torch._dynamo.reset()
    counters.clear()
    loop = Loop(device, **toy(device), half=torch.bfloat16, clip=1.0)
    plain, step = loop.model, loop.optimizer.step
    if watch:
        with watched(loop, every_step=True) as (daemon, _):
            found = _train(loop, way)
            loop.model, loop.optimizer.step = plain, step
        assert len(daemon.seqs()) == STEPS, daemon.seqs()
    else:
        found = _train(loop, way)
        loop.model = plain
    return loop, found


def _train(loop: Loop, way: Callable[[Loop], None]) -> tuple[int, ...]:
    way(loop)
    loop.run(STEPS)
    settle(loop.device)
    breaks: Counter[Any] = Counter(counters["graph_break"])
    recompiled: Counter[Any] = Counter(counters["recompiles"])
    return breaks.total(), counters["stats"]["unique_graphs"], recompiled.total()
