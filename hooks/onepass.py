"""Statistics of tensors in host memory by the compiled kernel (`_onepass.c`): all of them in one read of each tensor.

It is built with the wheel where a C compiler is there. Without it, and with a torch that cannot lend tensors to C (it
can since 2.10), torch's operations do the same in more time (`statistics.Eager`).
"""

from __future__ import annotations

import torch

from sentinel.hooks.statistics import Eager, Statistics

try:
    import sentinel.hooks._onepass as _onepass
except ImportError:
    _MISSING = "not built: no C compiler when Sentinel was installed"
else:
    _MISSING = "" if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else "it needs torch 2.10"

ROWS = 6
"""Norm, minimum, maximum, non-finite elements, smallest magnitude over 0, zeros."""


def missing() -> str:
    """Why there is no compiled kernel; empty where there is one."""
    return _MISSING


class OnePass:
    """Statistics that are all there."""

    on_host = True

    def __init__(self, table: torch.Tensor) -> None:
        """`table`: (ROWS, tensors) float32."""
        self.norms, low, high, self.nonfinite, self.smallest, self.zeros = table.unbind()
        self.extremes = low, high


def measured(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> Statistics:
    """The statistics of `tensors`, none of them empty: all at once where that can be done, else each when asked for."""
    if _MISSING or not tensors or not tensors[0].is_cpu or (scale is not None and not scale.is_cpu):
        return Eager(tensors, scale)
    table = torch.empty(ROWS, len(tensors))
    left = _onepass.measure(tensors, 1.0 if scale is None else float(scale), table)
    if left:  # not on the CPU, or not in memory without gaps, or of another type
        rest = Eager([tensors[place] for place in left], scale)
        if not rest.on_host:
            return Eager(tensors, scale)
        for row, column in enumerate((rest.norms, *rest.extremes, rest.nonfinite, rest.smallest, rest.zeros)):
            table[row, left] = column
    return OnePass(table)
