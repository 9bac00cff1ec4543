"""Statistics of tensors in host memory by the compiled kernel (`_onepass.c`): all of them in one read of each tensor.

It is built with the wheel where a C compiler is there. Without it, and with a torch that cannot lend tensors to C (it
can since 2.10), torch's operations do the same in more time (`statistics.TorchStatistics`).
"""

from __future__ import annotations

import math

import torch

from sentinel.hooks.measure.device_kernel import DeviceKernel, is_usable
from sentinel.hooks.measure.statistics import HIGH, LOW, NONFINITE, NORM, SMALLEST, ZEROS, Statistics, TorchStatistics
from sentinel.node.compiled_kernel import load_kernel

_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_onepass, _MISSING = load_kernel()
if _onepass is not None and _EXCHANGE is None:
    _MISSING = "it needs torch 2.10"

device_kernel = DeviceKernel(is_usable())

ROWS = 6
"""Norm, minimum, maximum, non-finite elements, smallest magnitude over 0, zeros."""


def missing() -> str:
    """Why there is no compiled kernel; empty where there is one."""
    return _MISSING


class KernelStatistics:
    """Statistics that are all there, packed: torch's operations on a few numbers cost more than reading them all."""

    on_host = True

    def __init__(self, packed: bytearray, total: float) -> None:
        """`packed`: (ROWS, tensors) float32."""
        self.total = total
        self._packed, self._width = packed, len(packed) // ROWS

    def column(self, statistic: int) -> bytes:
        """See Statistics."""
        return bytes(self._packed[statistic * self._width : (statistic + 1) * self._width])

    def row(self, statistic: int) -> torch.Tensor:
        """As a tensor over the same memory."""
        count, begin = self._width // 4, statistic * self._width
        return torch.frombuffer(self._packed, dtype=torch.float32, count=count, offset=begin)

    norms = property(lambda self: self.row(NORM))
    extremes = property(lambda self: (self.row(LOW), self.row(HIGH)))
    nonfinite = property(lambda self: self.row(NONFINITE))
    smallest = property(lambda self: self.row(SMALLEST))
    zeros = property(lambda self: self.row(ZEROS))


def whole(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> KernelStatistics | None:
    """The statistics of `tensors`; None where the kernel cannot read every one of them, or where one is None."""
    if not _applies(tensors, scale):
        return None
    packed = bytearray(ROWS * 4 * len(tensors))
    found = _onepass.measure(_EXCHANGE, tensors, 1.0 if scale is None else float(scale), packed, True)
    return KernelStatistics(packed, found[0]) if found is not None else None


def measure_tensors(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> Statistics:
    """The statistics of `tensors`, none of them empty: in one pass if possible, otherwise each when it is read."""
    if not tensors:
        return TorchStatistics(tensors, scale)
    if not _applies(tensors, scale):
        return device_kernel.measure(tensors, scale) or TorchStatistics(tensors, scale)
    packed = bytearray(ROWS * 4 * len(tensors))
    total, left = _onepass.measure(_EXCHANGE, tensors, 1.0 if scale is None else float(scale), packed, False)
    if left:  # not on the CPU, or not in memory without gaps, or of another type
        rest = TorchStatistics([tensors[place] for place in left], scale)
        if not rest.on_host:
            return TorchStatistics(tensors, scale)
        total = math.sqrt(total * total + rest.total * rest.total)
    found = KernelStatistics(packed, total)
    for statistic in range(ROWS) if left else ():
        found.row(statistic)[left] = rest.column(statistic)
    return found


def _applies(tensors: list[torch.Tensor], scale: torch.Tensor | None) -> bool:
    if _MISSING or not tensors:
        return False
    first = tensors[0]
    return (first is None or first.is_cpu) and (scale is None or scale.is_cpu)
