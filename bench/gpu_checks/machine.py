"""Shows the device and versions that the figures belong to, and the two bandwidths that bars are based on."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator

import torch

from bench.gpu_checks import Line
from bench.gpu_checks.loops import settle

BUSY_CYCLES = 40_000_000
"""Cycles for some 20 ms, more than it takes to launch a thousand kernels."""


def check(device: str) -> Iterator[Line]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    yield Line("device", name)
    yield Line("torch, CUDA, Triton", f"{torch.__version__}, {torch.version.cuda}, {_version('triton')}")
    yield Line("Python", platform.python_version())
    yield Line("copy on the device, bytes read and written", f"{copy_bandwidth(device) / 1e12:.2f} TB/s")
    size = (1 << 30) if device == "cuda" else 1 << 20
    source, into = torch.zeros(size, dtype=torch.uint8, device=device), _make_pinned(size, device)
    seconds = time_call(device, lambda: into.copy_(source, non_blocking=True))
    yield Line("copy to pinned memory", f"{size / seconds / 1e9:.1f} GB/s")


def copy_bandwidth(device: str) -> float:
    """Return the bytes per second, read and written, by which bars over one read of the gradients are computed."""
    size = (4 << 30) if device == "cuda" else 1 << 22
    source = torch.zeros(size // 4, device=device)
    into = torch.empty_like(source)
    return 2 * size / time_call(device, lambda: into.copy_(source))


def time_call(device: str, call: Callable[[], object], times: int = 20) -> float:
    """Return the median seconds of a call; on a GPU the device's own, between two events.

    The GPU is kept busy until the call is launched, as in a loop whose steps take longer than launching them.
    """
    for _ in range(3):
        call()
    seconds = []
    for _ in range(times if device == "cuda" else 3):
        if device == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            call()
            end.record()
            settle(device)
            seconds.append(begin.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]


def _make_pinned(size: int, device: str) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
