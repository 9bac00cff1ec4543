"""Attaching to a daemon that lives in this process and keeps all it is sent."""

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
    """One that `attach` finds."""
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
    """`eager`: torch's operations; `Triton`: the fused kernel. The compiled one of the CPU is left out."""
    before = kernels.kernel_missing, kernels.device_kernel
    kernels.kernel_missing, kernels.device_kernel = "left out", ONLY[kernel]()
    try:
        yield
    finally:
        kernels.kernel_missing, kernels.device_kernel = before


class Torch(DeviceKernel):
    """None."""

    def __init__(self) -> None:
        super().__init__(usable=False)


class Triton(DeviceKernel):
    """It is compiled where it is launched first, on the CPU too, and what fails there is raised."""

    def __init__(self) -> None:
        super().__init__(usable=True)

    def measure(self, tensors: list[torch.Tensor], scale: torch.Tensor | None) -> Statistics:
        from sentinel.hooks.measure import triton_kernel

        return triton_kernel.measure_tensors(tensors, scale)


ONLY: dict[str, type[DeviceKernel]] = {"eager": Torch, "Triton": Triton}


def signals(daemon: FakeDaemon) -> set[str]:
    """That arrived, of scope `rank`."""
    return {name for batch in daemon.of(wire.Batch) for name in batch.columns}


@contextlib.contextmanager
def watched(loop: Any, *, every_step: bool = False, **more: Any) -> Iterator[tuple[FakeDaemon, Any]]:
    """(daemon, monitor) of a loop, until the block ends and everything has arrived. `every_step`: all tiers at each."""
    due, rare = Governor.due, Governor.rare
    if every_step:
        Governor.due = Governor.rare = lambda *_, **__: True  # type: ignore[method-assign, assignment]
    try:
        with daemon() as served:
            monitor = sentinel.attach(loop.model, loop.optimizer, **more)
            yield served, monitor
            monitor.detach()
            served.ended()
    finally:
        Governor.due, Governor.rare = due, rare  # type: ignore[method-assign]
