"""Attaching to a daemon that lives in this process and keeps all it is sent."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentinel
from sentinel import wire
from sentinel.hooks.core import governor
from sentinel.hooks.measure import cpu_kernel
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
    before = cpu_kernel._MISSING, cpu_kernel._fused
    cpu_kernel._MISSING, cpu_kernel._fused = "left out", None
    if kernel == "Triton":
        from sentinel.hooks.measure import triton_kernel

        cpu_kernel._fused = triton_kernel.measure_tensors
    try:
        yield
        if kernel == "Triton" and cpu_kernel._fused is None:
            raise RuntimeError("the Triton kernel failed and torch's operations took its place")
    finally:
        cpu_kernel._MISSING, cpu_kernel._fused = before


def signals(daemon: FakeDaemon) -> set[str]:
    """That arrived, of scope `rank`."""
    return {name for batch in daemon.of(wire.Batch) for name in batch.columns}


@contextlib.contextmanager
def watched(loop: Any, *, every_step: bool = False, **more: Any) -> Iterator[tuple[FakeDaemon, Any]]:
    """(daemon, monitor) of a loop, until the block ends and everything has arrived. `every_step`: all tiers at each."""
    first, decisions, measured = governor.FIRST, governor.DECISIONS, governor.MEASURED
    if every_step:
        governor.FIRST, governor.DECISIONS, governor.MEASURED = dict.fromkeys(first, 1), (10**9,), 0
    try:
        with daemon() as served:
            monitor = sentinel.attach(loop.model, loop.optimizer, **more)
            yield served, monitor
            monitor.detach()
            served.ended()
    finally:
        governor.FIRST, governor.DECISIONS, governor.MEASURED = first, decisions, measured
