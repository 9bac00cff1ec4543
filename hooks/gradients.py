"""The gradients of one step, and their statistics: each computed once, when the first probe asks.

Norms are L2, summed in float32 at least: fp16 squares overflow. NaN and infinity go through norm, minimum and maximum,
so a layer needs a closer look only where one of these is not finite. `foreach_norm(inf)` and `isfinite` over all
gradients would cost 20 times as much on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from sentinel.hooks.layers import Layers, local
from sentinel.hooks.tally import Scalar


class Gradients:
    """What the optimizer is about to apply. `scale`: what the gradients are still multiplied by (None: nothing)."""

    def __init__(self, layers: Layers, scale: torch.Tensor | None = None) -> None:
        self._layers = layers
        self._scale = scale
        self.rows: list[int] = []
        """Row in the layer table of each gradient."""
        self.tensors: list[torch.Tensor] = []
        """This rank's part of each gradient: never empty, never sparse, never complex."""
        self.left_out: dict[str, str] = {}
        """Layer -> why its gradient is not measured."""
        for row, parameter in layers.parameters:
            if parameter.grad is not None:
                self._take(row, local(parameter.grad))

    def _take(self, row: int, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            self.left_out[self._layers.table.layers[row].name] = "sparse"
        elif gradient.is_complex():
            self.left_out[self._layers.table.layers[row].name] = "complex"
        elif gradient.numel():
            self.rows.append(row)
            self.tensors.append(gradient)

    @functools.cached_property
    def on_host(self) -> bool:
        """Whether reading a value waits for nothing."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors)

    @functools.cached_property
    def norms(self) -> torch.Tensor:
        """(layers,) float32: L2 norm of each gradient, unscaled."""
        norms: list[Any] = [None] * len(self.tensors)
        for dtype, places in self._by_dtype().items():
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
        suspects = torch.isfinite(low).logical_and_(torch.isfinite(high)).logical_not_().nonzero()
        counts = torch.zeros_like(low)
        for place in suspects.flatten().tolist():
            counts[place] = int(torch.isfinite(self.tensors[place]).logical_not_().sum())
        return counts

    @functools.cached_property
    def total(self) -> Scalar:
        """L2 norm over all layers."""
        return self._norm_over(self.norms)

    @functools.cached_property
    def sharded(self) -> Scalar | None:
        """L2 norm over the layers of which this rank holds a shard; None where there are none."""
        table = self._layers.table.layers
        if not any(layer.sharded for layer in table):
            return None
        shards = [place for place, row in enumerate(self.rows) if table[row].sharded]
        return self._norm_over(self.norms[shards])

    def _norm_over(self, norms: torch.Tensor) -> Scalar:
        total = torch.linalg.vector_norm(norms, dtype=torch.float64 if self.on_host else torch.float32)
        return float(total) if self.on_host else total

    def _by_dtype(self) -> dict[torch.dtype, list[int]]:
        places: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(self.tensors):
            places.setdefault(tensor.dtype, []).append(place)
        return places

    def _column(self, values: Sequence[torch.Tensor], *, scaled: bool = True) -> torch.Tensor:
        if not values:
            return torch.empty(0)
        device = values[0].device
        column = torch.stack([value.to(device, torch.float32, non_blocking=True) for value in values])
        if scaled and self._scale is not None:
            column /= self._scale.to(device, torch.float32)
        return column
