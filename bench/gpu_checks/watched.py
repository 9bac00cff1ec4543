"""Attaches loops to a fake daemon in this process that keeps everything it receives."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sentinel
from sentinel import wire
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.measure import kernels
from sentinel.hooks.measure.kernels import DeviceKernel
from sentinel.hooks.measure.statistics import Statistics
from tests.hooks.conftest import FakeDaemon


@contextlib.contextmanager
def daemon() -> Iterator[FakeDaemon]:
    """Run a fake daemon that `attach` finds by SENTINEL_ADDRESS."""
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        made = FakeDaemon(Path(folder) / "d.sock")
        os.environ["SENTINEL_ADDRESS"] = made.address
        try:
            yield made
        finally:
            del os.environ["SENTINEL_ADDRESS"]
            made.close()


@contextlib.contextmanager
def statistics_by(kernel: str) -> Iterator[None]:
    """Take statistics by torch's operations (`eager`) or by the fused kernel (`Triton`), never by the CPU's kernel."""
    before = kernels.kernel_missing, kernels.device_kernel
    kernels.kernel_missing, kernels.device_kernel = "left out", ONLY[kernel]()
    try:
        yield
    finally:
        kernels.kernel_missing, kernels.device_kernel = before


class Torch(DeviceKernel):
    """No device kernel: torch's operations are used."""

    def __init__(self) -> None:
        super().__init__(usable=False)


class Triton(DeviceKernel):
    """The Triton kernel, compiled at its first launch, on the CPU too; its errors are raised."""

    def __init__(self) -> None:
        super().__init__(usable=True)

    def measure(self, tensors: list[torch.Tensor], scale: torch.Tensor | None) -> Statistics:
        from sentinel.hooks.measure import triton_kernel

        return triton_kernel.measure_tensors(tensors, scale)


ONLY: dict[str, type[DeviceKernel]] = {"eager": Torch, "Triton": Triton}


def signals(daemon: FakeDaemon) -> set[str]:
    """Return the names of the signals of scope `rank` that arrived."""
    return {name for batch in daemon.of(wire.Batch) for name in batch.columns}


@contextlib.contextmanager
def watched(loop: Any, *, every_step: bool = False, **more: Any) -> Iterator[tuple[FakeDaemon, Any]]:
    """Attach a loop; yield (daemon, monitor), then wait until all arrived. `every_step`: sample all tiers each step."""
    due, rare = Governor.due, Governor.take_rare_turn
    if every_step:
        Governor.due = Governor.take_rare_turn = lambda *_, **__: True  # type: ignore[method-assign, assignment]
    try:
        with daemon() as served:
            monitor = sentinel.attach(loop.model, loop.optimizer, **more)
            yield served, monitor
            monitor.detach()
            served.ended()
    finally:
        Governor.due, Governor.take_rare_turn = due, rare  # type: ignore[method-assign]
