"""Checks that values arrive as the loop has them: packed on the device, copied behind it, and read by a thread."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from bench.gpu_checks import Line, equal
from bench.gpu_checks.loops import Loop, settle, toy
from bench.gpu_checks.watched import signals, statistics_by, watched


def check(device: str) -> Iterator[Line]:
    for how in ("eager", "Triton") if device == "cuda" else ("Triton",):
        with statistics_by(how):
            yield from _check_stream(device, how)


def _check_stream(device: str, how: str) -> Iterator[Line]:
    loop = Loop(device, **toy(device), half=torch.bfloat16)
    steps, looked_at = (40, (7, 23)) if device == "cuda" else (6, (2, 4))
    norms: dict[int, dict[str, float]] = {}
    memory: dict[int, float] = {}

    def note(*_: object) -> None:
        if loop.steps in looked_at:
            norms[loop.steps] = {name: float(p.grad.norm()) for name, p in loop.model.named_parameters()}
        if device == "cuda" and loop.steps == looked_at[-1] + 1:
            memory[loop.steps] = float(torch.cuda.memory_allocated())

    loop.optimizer.register_step_pre_hook(note)
    with watched(loop, every_step=True) as (daemon, _):
        loop.run(steps)
        settle(device)
    yield equal(f"{how}: steps that arrived", daemon.seqs(), list(range(steps)))
    losses = daemon.series("loss")
    own = [float(loss) for loss in loop.losses]
    yield equal(f"{how}: losses, to the bit of float32", [losses.get(seq) for seq in range(steps)], own)
    found = daemon.layers("layer_grad_norm")
    off = max(_off(found[seq][name], norm) for seq, of in norms.items() for name, norm in of.items())
    yield Line(f"{how}: norms of layers, largest difference", f"{off:.1e}", off < 1e-5, "1e-05")
    total = daemon.series("grad_norm")
    off = max(_off(total[seq], math.hypot(*of.values())) for seq, of in norms.items())
    yield Line(f"{how}: total norm, difference", f"{off:.1e}", off < 1e-5, "1e-05")
    if memory:
        allocated = daemon.series("memory_allocated_bytes")
        off = max(_off(allocated[seq], bytes_) for seq, bytes_ in memory.items())
        yield Line(f"{how}: allocated bytes beside torch's own", f"{off:.1%} off", off < 0.05, "5%")
        names = ("memory_reserved_bytes", "memory_active_bytes", "memory_inactive_split_bytes", "allocation_retries")
        yield equal(f"{how}: allocator signals", sorted(set(names) & signals(daemon)), sorted(names))


def _off(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-12)
