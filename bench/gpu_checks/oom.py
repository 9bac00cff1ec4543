"""Compares the post mortem of failing allocations with the allocator's own figures, in each phase of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

import sentinel
from bench.gpu_checks import Line
from bench.gpu_checks.loops import Loop, toy
from bench.gpu_checks.watched import daemon
from sentinel import wire
from sentinel.wire.evidence import OutOfMemory

SHARE = 0.06
"""Share of the card that the process may take: so little that it fills up quickly."""
CPU_BYTES = 1 << 50
OFF = 0.05


def check(device: str) -> Iterator[Line]:
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(SHARE)
    for phase, ask in {"forward": _forward, "backward": _backward, "optimizer": _optimizer}.items():
        if phase == "optimizer" and device == "cpu":
            continue
        yield from _broken(device, phase, ask)


def _broken(device: str, phase: str, ask: Callable[[Loop], None]) -> Iterator[Line]:
    options = toy(device) or {"width": 512, "layers": 4}
    loop, own = Loop(device, **options), {}
    with daemon() as served:
        with contextlib.suppress(RuntimeError), sentinel.attach(loop.model, loop.optimizer):
            if phase != "optimizer":
                loop.run(3)
            try:
                ask(loop)
            except RuntimeError:
                own = _own(device) if phase == "forward" else {}  # in the other phases much is freed before this point
                raise
        served.ended()
        told = [one.content for one in served.of(wire.Collected) if one.what == "out_of_memory"]
    if not told:
        yield Line(f"{phase}: a post mortem", "none", False)
        return
    found = msgspec.convert(told[0], OutOfMemory)
    yield Line(f"{phase}: the phase", found.phase, found.phase == phase, phase)
    size, said = sum(parameter.nbytes for parameter in loop.model.parameters()), found.line.rpartition("/")[2]
    yield Line(f"{phase}: parameters", f"{found.parameters} bytes", found.parameters == size, f"{size}")
    yield Line(f"{phase}: asked for", f"{found.requested / 1e9:.2f} GB at {said}", found.requested > 0)
    for name, value in own.items():
        said = getattr(found, name)
        off = abs(said - value) / value
        yield Line(f"{phase}: {name}", f"{said / 1e9:.2f} GB, {off:.1%} off", off < OFF, f"{OFF:.0%}")
    if device == "cuda":
        torch.cuda.empty_cache()


def _own(device: str) -> dict[str, float]:
    """Return the allocator's own figures, before anything is freed."""
    if device == "cpu":
        return {}
    known = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return known | {"limit": SHARE * torch.cuda.get_device_properties(0).total_memory}


def _size(loop: Loop) -> int:
    """Return a number of elements for which there is no room."""
    if loop.device == "cpu":
        return CPU_BYTES
    return int(SHARE * torch.cuda.get_device_properties(0).total_memory)


def _forward(loop: Loop) -> None:
    held = [torch.empty(_size(loop) // 16, device=loop.device) for _ in range(2 if loop.device == "cuda" else 0)]
    output = loop.model(loop.data[0])  # named, because the exception would otherwise free it before the comparison
    (output + torch.empty(_size(loop), device=loop.device).sum()).backward()
    del held


def _backward(loop: Loop) -> None:
    Fails.apply(loop.model(loop.data[0]), _size(loop)).backward()


def _optimizer(loop: Loop) -> None:
    """Fill the memory, so that AdamW cannot make its state at its first step."""
    loop.optimizer.zero_grad()
    loop.model(loop.data[0]).backward()
    held = []
    while True:
        try:
            held.append(torch.empty(1 << 20, device=loop.device))
        except torch.OutOfMemoryError:
            break
    loop.optimizer.step()


class Fails(torch.autograd.Function):
    """A backward pass that allocates too much."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient + torch.empty(ctx.size, device=gradient.device).sum(), None
