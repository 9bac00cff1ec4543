"""The gradients of one step, and their statistics: each computed once, when the first probe asks.

Norms are L2, summed in float32 at least: fp16 squares overflow. NaN and infinity go through norm, minimum and maximum,
so a layer needs a closer look only where one of these is not finite. `foreach_norm(inf)` and `isfinite` over all
gradients would cost 20 times as much on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sentinel.hooks.layers import Layers, local
from sentinel.hooks.tally import Scalar, is_finite


class Gradients:
    """What the optimizer is about to apply. `scale`: what the gradients are still multiplied by (None: nothing)."""

    def __init__(self, layers: Layers, scale: torch.Tensor | None = None) -> None:
        self._layers = layers
        self._scale = scale
        self.rows: list[int] = []
        """Row in the layer table of each gradient."""
        self.tensors: list[torch.Tensor] = []
        """This rank's part of each gradient: never empty, never sparse, never complex."""
        self.left_out: dict[str, str] = dict(layers.left_out)
        """Layer -> why its gradient is not measured."""
        for row, parameter, whole in layers.measured:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                self.left_out[layers.table.layers[row].name] = "sparse"
                continue
            self.rows.append(row)
            self.tensors.append(gradient if whole else local(gradient))

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether reading a value waits for nothing."""
        return all(device.type == "cpu" for _, device in self._alike)

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """(layers,) float32: L2 norm of each gradient, unscaled."""
        norms: list[Any] = [None] * len(self.tensors)
        for (dtype, _), places in self._alike.items():
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            found = torch._foreach_norm([self.tensors[i] for i in places], 2, dtype=wide)
            for place, norm in zip(places, found, strict=True):
                norms[place] = norm
        return self._column(norms)

    @functools.cached_property
    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(layers,) float32 each: smallest and largest element of each gradient, unscaled."""
        pairs = [torch.aminmax(tensor) for tensor in self.tensors]
        return self._column([pair[0] for pair in pairs]), self._column([pair[1] for pair in pairs])

    @functools.cached_property
    def nonfinite(self) -> torch.Tensor:
        """(layers,) float32: elements of each gradient that are NaN or infinite.

        On the CPU only the layers whose minimum or maximum is not finite are counted. A device cannot be asked without
        waiting for it, so there all are (two launches a layer; never run on a GPU yet).
        """
        if not self.on_host:
            return self._column([t.numel() - torch.isfinite(t).count_nonzero() for t in self.tensors], scaled=False)
        low, high = self.extremes
        counts = torch.zeros_like(low)
        if not is_finite(self.total):  # else no element is
            for place in (low + high).isfinite().logical_not_().nonzero().flatten().tolist():
                counts[place] = int(self.tensors[place].isfinite().logical_not_().sum())
        return counts

    @functools.cached_property
    def total(self) -> Scalar:
        """L2 norm over all layers."""
        return self._norm_over(self.norms)

    @functools.cached_property
    def sharded(self) -> Scalar | None:
        """L2 norm over the layers of which this rank holds a shard; None where there are none."""
        if not self._layers.sharded:
            return None
        shards = [place for place, row in enumerate(self.rows) if row in self._layers.sharded]
        return self._norm_over(self.norms[shards])

    def _norm_over(self, norms: torch.Tensor) -> Scalar:
        total = torch.linalg.vector_norm(norms, dtype=torch.float64 if self.on_host else torch.float32)
        return float(total) if self.on_host else total

    @functools.cached_property
    def _alike(self) -> dict[tuple[torch.dtype, torch.device], list[int]]:
        """Places of the tensors of one type and device: what one foreach kernel can do."""
        places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(self.tensors):
            places.setdefault((tensor.dtype, tensor.device), []).append(place)
        return places

    def _column(self, values: list[torch.Tensor], *, scaled: bool = True) -> torch.Tensor:
        if not values:
            return torch.empty(0)
        device = values[0].device
        if len(self._alike) > 1:
            values = [value.to(device, torch.float32, non_blocking=True) for value in values]
        column = torch.stack(values).to(torch.float32)
        if scaled and self._scale is not None:
            column /= self._scale.to(device, torch.float32)
        return column
