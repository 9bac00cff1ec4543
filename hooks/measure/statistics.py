"""Statistics of tensors by torch's own operations: the reference for every kernel, and used where there is none.

Norms are L2, summed in float32 at least: fp16 squares overflow. Where those of float32 overflow, too (elements over
1e19), the norm is computed again in float64, but only on the CPU: on a device it is infinite. NaN and infinity show in
norm, minimum and maximum, so a tensor needs a closer look only where one of these is not finite. `foreach_norm(inf)`
and `isfinite` over all gradients would cost 20 times as much on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from sentinel.hooks.torch_interop.internals import foreach_norm
from sentinel.hooks.torch_interop.tensors import Scalar, meeting_place

NORM, LOW, HIGH, NONFINITE, SMALLEST, ZEROS = range(6)
_NAMES = {NORM: "norms", NONFINITE: "nonfinite", SMALLEST: "smallest", ZEROS: "zeros"}

PIECE = 1 << 24
"""Most elements of a tensor on a device that are examined at once, where that takes memory."""


class Statistics(Protocol):
    """Statistics of tensors that are not empty: a float32 per tensor each, divided by the loss scale, if any."""

    @property
    def on_host(self) -> bool:
        """Whether a value can be read without waiting for a device."""

    @property
    def total(self) -> Scalar:
        """L2 norm over all tensors."""

    def column(self, statistic: int) -> torch.Tensor | bytes:
        """Return the statistic with this number (`NORM` ...), packed where it is on the host already."""

    @property
    def norms(self) -> torch.Tensor:
        """L2 norm of each tensor."""

    @property
    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Smallest and largest element; NaN where an element is NaN."""

    @property
    def nonfinite(self) -> torch.Tensor:
        """Number of elements that are NaN or infinite."""

    @property
    def smallest(self) -> torch.Tensor:
        """Smallest finite magnitude over 0; 0 where there is none."""

    @property
    def zeros(self) -> torch.Tensor:
        """Number of elements that are 0."""


class TorchStatistics:
    """Statistics by torch's operations: each is computed when it is first asked for, and once."""

    def __init__(self, tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> None:
        self._tensors, self._scale = tensors, scale

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether a value can be read without waiting for a device."""
        return all(device.type == "cpu" for _, device in self._alike)

    @functools.cached_property
    def total(self) -> Scalar:
        """See Statistics."""
        return combine_norms(self.norms)

    def column(self, statistic: int) -> torch.Tensor:
        """See Statistics."""
        if statistic in (LOW, HIGH):
            return self.extremes[statistic - LOW]
        column: torch.Tensor = getattr(self, _NAMES[statistic])
        return column

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """See Statistics."""
        norms: list[Any] = [None] * len(self._tensors)
        for (dtype, _), places in self._alike.items():
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            found = foreach_norm([self._tensors[i] for i in places], 2, dtype=wide)
            for place, norm in zip(places, found, strict=True):
                norms[place] = norm
        column = self._column(norms)
        if self.on_host:
            scale = 1.0 if self._scale is None else float(self._scale)
            for place in column.isinf().nonzero().flatten().tolist():  # float64 takes 2 to 12 times as long
                column[place] = torch.linalg.vector_norm(self._tensors[place], dtype=torch.float64) / scale
        return column

    @functools.cached_property
    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See Statistics."""
        pairs = [torch.aminmax(tensor) for tensor in self._tensors]
        return self._column([pair[0] for pair in pairs]), self._column([pair[1] for pair in pairs])

    @functools.cached_property
    def nonfinite(self) -> torch.Tensor:
        """See Statistics.

        On the CPU only the elements of tensors whose minimum or maximum is not finite are counted. To find these on a
        device would wait for it, so there those of all tensors are (two launches a tensor).
        """
        if not self.on_host:
            return self._column([_nonfinite(tensor) for tensor in self._tensors], scaled=False)
        low, high = self.extremes
        counts = torch.zeros_like(low)
        for place in (low + high).isfinite().logical_not_().nonzero().flatten().tolist():
            counts[place] = int(self._tensors[place].isfinite().logical_not_().sum())
        return counts

    @functools.cached_property
    def smallest(self) -> torch.Tensor:
        """See Statistics."""
        found = []
        for tensor in self._tensors:
            magnitudes = tensor.abs()
            magnitudes.masked_fill_((magnitudes == 0) | ~magnitudes.isfinite(), torch.inf)
            least = magnitudes.amin()
            found.append(least.masked_fill(least == torch.inf, 0.0))
        return self._column(found)

    @functools.cached_property
    def zeros(self) -> torch.Tensor:
        """See Statistics."""
        return self._column([tensor.numel() - tensor.count_nonzero() for tensor in self._tensors], scaled=False)

    @functools.cached_property
    def _alike(self) -> dict[tuple[torch.dtype, torch.device], list[int]]:
        """(type, device) -> places of its tensors: what one foreach kernel can process."""
        places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(self._tensors):
            places.setdefault((tensor.dtype, tensor.device), []).append(place)
        return places

    def _column(self, values: list[torch.Tensor], *, scaled: bool = True) -> torch.Tensor:
        if not values:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        device = meeting_place(values)
        if len(self._alike) > 1:
            values = [value.to(device, torch.float32, non_blocking=True) for value in values]
        column = torch.stack(values).to(torch.float32)
        if scaled and self._scale is not None:
            column /= self._scale.to(device, torch.float32)
        return column


def _nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Count non-finite elements, in pieces of a large tensor: `isfinite` takes memory, which may be nearly full."""
    if tensor.numel() <= PIECE or not tensor.is_contiguous():
        return tensor.numel() - torch.isfinite(tensor).count_nonzero()
    return torch.stack([_nonfinite(part) for part in torch.split(tensor.view(-1), PIECE)]).sum()


def combine_norms(norms: torch.Tensor) -> Scalar:
    """Return the L2 norm of tensors that have these norms; a number if they are on the host."""
    on_host = norms.device.type == "cpu"
    total = torch.linalg.vector_norm(norms, dtype=torch.float64 if on_host else torch.float32)
    return float(total) if on_host else total
