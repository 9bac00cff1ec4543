"""Statistics of tensors by the fastest kernel available: the compiled one on the CPU, Triton's on a GPU.

The compiled kernel (`_onepass.c`) takes all of them in one read of each tensor. It is built with the wheel if there is
a C compiler, and needs a torch that can lend tensors to C (2.10). Triton's takes some seconds to compile if its cache
does not have it, so a thread compiles it. Until then, and where there is no kernel, torch's operations give the same in
more time (`statistics.TorchStatistics`): on a GPU they launch several kernels for each tensor.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from functools import partial
from types import ModuleType

import torch

from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import is_passing
from sentinel.hooks.core.threads import Task, Worker
from sentinel.hooks.measure.statistics import HIGH, LOW, NONFINITE, NORM, SMALLEST, ZEROS, Statistics, TorchStatistics
from sentinel.node.compiled_kernel import load_kernel

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""The interface by which torch lends tensors to C; None in a torch without it."""
onepass, kernel_missing = load_kernel()
"""The compiled kernel, and the reason why there is none, which is empty where there is one."""
if onepass is not None and EXCHANGE is None:
    kernel_missing = "it needs torch 2.10"

ROWS = 6
"""Number of statistics: norm, minimum, maximum, non-finite elements, smallest magnitude over 0, zeros."""


class KernelStatistics:
    """Complete statistics in packed memory: torch's operations on a few numbers cost more than reading them all."""

    on_host = True

    def __init__(self, packed: bytearray, total: float) -> None:
        """`packed`: (ROWS, tensors) float32."""
        self.total = total
        self._packed, self._width = packed, len(packed) // ROWS

    def column(self, statistic: int) -> bytes:
        """See `Statistics.column`."""
        return bytes(self._packed[statistic * self._width : (statistic + 1) * self._width])

    def row(self, statistic: int) -> torch.Tensor:
        """Return a statistic as a tensor over the same memory."""
        count, begin = self._width // 4, statistic * self._width
        return torch.frombuffer(self._packed, dtype=torch.float32, count=count, offset=begin)

    norms = property(lambda self: self.row(NORM))
    extremes = property(lambda self: (self.row(LOW), self.row(HIGH)))
    nonfinite = property(lambda self: self.row(NONFINITE))
    smallest = property(lambda self: self.row(SMALLEST))
    zeros = property(lambda self: self.row(ZEROS))


def measure_in_one_pass(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> KernelStatistics | None:
    """Return the statistics of `tensors`; None where the compiled kernel cannot read all of them, or one is None."""
    if not _applies(tensors, scale):
        return None
    packed = bytearray(ROWS * 4 * len(tensors))
    found = onepass.measure(EXCHANGE, tensors, 1.0 if scale is None else float(scale), packed, True)
    return KernelStatistics(packed, found[0]) if found is not None else None


def measure_tensors(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> Statistics:
    """Return the statistics of `tensors`, none of them empty: in one pass if possible, else each when it is read."""
    if not tensors:
        return TorchStatistics(tensors, scale)
    if not _applies(tensors, scale):
        return device_kernel.measure(tensors, scale) or TorchStatistics(tensors, scale)
    packed = bytearray(ROWS * 4 * len(tensors))
    total, left = onepass.measure(EXCHANGE, tensors, 1.0 if scale is None else float(scale), packed, False)
    if left:  # places of tensors not on the CPU, with gaps in their memory, or of another type
        rest = TorchStatistics([tensors[place] for place in left], scale)
        if not rest.on_host:
            return TorchStatistics(tensors, scale)
        total = math.sqrt(total * total + rest.total * rest.total)
    found = KernelStatistics(packed, total)
    for statistic in range(ROWS) if left else ():
        found.row(statistic)[left] = rest.column(statistic)
    return found


def _applies(tensors: list[torch.Tensor], scale: torch.Tensor | None) -> bool:
    if kernel_missing or not tensors:
        return False
    first = tensors[0]
    return (first is None or first.is_cpu) and (scale is None or scale.is_cpu)


def is_usable() -> bool:
    """Whether this torch is for CUDA, Triton is installed, and SENTINEL_TRITON does not turn the kernel off. With
    Triton's interpreter (TRITON_INTERPRET) it is not: that would read device addresses in host memory."""
    wanted = os.environ.get("SENTINEL_TRITON", "1") not in ("", "0")
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    there = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    return wanted and there and not interpreted


class DeviceKernel:
    """The Triton kernel of this process."""

    def __init__(self, usable: bool, device_type: str = "cuda") -> None:
        self._usable, self._device_type = usable, device_type
        self._kernel: ModuleType | None = None
        self._worker = Worker("sentinel-compile", finishes=True)
        self._compiling: Task | None = None

    def load(self) -> None:
        """Import Triton, which takes some tenths of a second, and start the thread that compiles; before the loop. Not
        called where the model is not on a GPU yet: then torch's operations are used throughout."""
        if self._usable and self._kernel is None:
            try:
                self._kernel = importlib.import_module("sentinel.hooks.measure.triton_kernel")
                self._worker.start()
            except Exception:
                self._give_up()

    def measure(self, tensors: list[torch.Tensor], scale: torch.Tensor | None) -> Statistics | None:
        """Return the statistics of `tensors`, under way on the device; None where torch must compute them."""
        kernel = self._kernel
        if not self._usable or kernel is None or tensors[0].device.type != self._device_type:
            return None
        try:
            if not kernel.can_read(tensors) or not self._is_ready(kernel, tensors):
                return None
            found: Statistics = kernel.measure_tensors(tensors, scale)
        except Exception as error:
            faults.let_through(error)
            if not is_passing(error):
                self._give_up()
            return None
        return found

    def _is_ready(self, kernel: ModuleType, tensors: list[torch.Tensor]) -> bool:
        """Whether all that `tensors` need is compiled; if not, submit the compilation."""
        if self._compiling is not None and not self._compiling.over:
            return False
        if missing := kernel.list_uncompiled(tensors):
            self._compiling = self._worker.submit(partial(self._compile, kernel, missing))
            return False
        return True

    def _compile(self, kernel: ModuleType, variants: object) -> None:
        try:
            kernel.compile_variants(variants)
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        """Stop using the kernel, which cannot be had here: no thread, no C compiler, an old GPU, a full disk."""
        self._usable = False
        faults.swallow("the Triton kernel", "with torch's operations in its place")


device_kernel = DeviceKernel(is_usable())
