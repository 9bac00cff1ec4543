"""Statistics of tensors in host memory by the compiled kernel (`_onepass.c`): all of them in one read of each tensor.

It is built with the wheel where a C compiler is there. Without it, and with a torch that cannot lend tensors to C (it
can since 2.10), torch's operations do the same in more time (`statistics.Eager`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from sentinel.hooks import faults
from sentinel.hooks.statistics import HIGH, LOW, NONFINITE, NORM, SMALLEST, ZEROS, Eager, Statistics

try:
    import sentinel.hooks._onepass as _onepass
except ImportError:
    _MISSING = "not built: no C compiler when Sentinel was installed"
else:
    _MISSING = "" if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else "it needs torch 2.10"
_EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

ROWS = 6
"""Norm, minimum, maximum, non-finite elements, smallest magnitude over 0, zeros."""


def missing() -> str:
    """Why there is no compiled kernel; empty where there is one."""
    return _MISSING


class OnePass:
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


def whole(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> OnePass | None:
    """The statistics of `tensors`; None where the kernel cannot read every one of them, or where one is None."""
    if not _applies(tensors, scale):
        return None
    packed = bytearray(ROWS * 4 * len(tensors))
    found = _onepass.measure(_EXCHANGE, tensors, 1.0 if scale is None else float(scale), packed, True)
    return OnePass(packed, found[0]) if found is not None else None


def measured(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> Statistics:
    """The statistics of `tensors`, none of them empty: all at once where that can be done, else each when asked for."""
    if not _applies(tensors, scale):
        return _on_device(tensors, scale)
    packed = bytearray(ROWS * 4 * len(tensors))
    total, left = _onepass.measure(_EXCHANGE, tensors, 1.0 if scale is None else float(scale), packed, False)
    if left:  # not on the CPU, or not in memory without gaps, or of another type
        rest = Eager([tensors[place] for place in left], scale)
        if not rest.on_host:
            return Eager(tensors, scale)
        total = math.sqrt(total * total + rest.total * rest.total)
    found = OnePass(packed, total)
    for statistic in range(ROWS) if left else ():
        found.row(statistic)[left] = rest.column(statistic)
    return found


def _applies(tensors: list[torch.Tensor], scale: torch.Tensor | None) -> bool:
    if _MISSING or not tensors:
        return False
    first = tensors[0]
    return (first is None or first.is_cpu) and (scale is None or scale.is_cpu)


def _on_device(tensors: list[torch.Tensor], scale: torch.Tensor | None) -> Statistics:
    global _fused
    if _fused is None or not tensors or any(tensor.device != tensors[0].device for tensor in tensors):
        return Eager(tensors, scale)
    try:
        return _fused(tensors, scale)
    except Exception:  # it cannot be compiled here
        _fused = None
        faults.swallow("the Triton kernel", "with torch's operations in its place")
        return Eager(tensors, scale)


def _triton() -> Callable[[list[torch.Tensor], torch.Tensor | None], Statistics] | None:
    """The kernel for CUDA, which has never run on a GPU yet: where SENTINEL_TRITON asks for it."""
    if os.environ.get("SENTINEL_TRITON", "0") in ("", "0"):
        return None
    try:
        from sentinel.hooks import fused
    except ImportError as error:
        faults.say(f"SENTINEL_TRITON is set, and Triton cannot be used ({error}): torch's operations stay")
        return None
    return fused.measured


_fused = _triton()
