"""The gradients of one step, and their statistics, each computed once, when a probe first asks for it."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from sentinel.hooks.measure import kernels
from sentinel.hooks.measure.statistics import Statistics, TorchStatistics, combine_norms
from sentinel.hooks.torch_interop.layer_table import Layers, is_wrapper_tensor, local
from sentinel.hooks.torch_interop.tensors import Scalar, send_numbers


class Gradients:
    """The gradients that the optimizer is about to apply. `scale`: a factor that they still contain (None: none)."""

    def __init__(self, layers: Layers, scale: torch.Tensor | None = None) -> None:
        self._layers = layers
        self.scale = scale
        self.rows: list[int] = layers.rows
        """Row in the layer table, for each gradient."""
        self.left_out: dict[str, str] = layers.left_out
        """Layer -> reason why its gradient is not measured."""
        self.absent = self.absent_numbers = 0
        """Number of trainable parameters without a gradient, and of the elements in them."""
        found = [p.grad for p in layers.plain] if layers.plain else [_part(p) for _, p, _ in layers.measured]
        for place, parameter in layers.frozen:
            if not parameter.requires_grad:
                found[place] = None  # a gradient that was left says nothing of the layer
        self.tensors: list[torch.Tensor] = found
        """This rank's part of each gradient: none is empty, sparse, complex, or a wrapper around other tensors."""
        self._released: list[weakref.ref[torch.Tensor]] = []
        whole = kernels.measure_in_one_pass(found, scale)
        if whole is None:
            self._leave_out()
        self._statistics: Statistics = whole or kernels.measure_tensors(self.tensors, scale)

    def _leave_out(self) -> None:
        """Keep only gradients that exist and lie in plain memory."""
        found = zip(self._layers.measured, self.tensors, strict=True)
        self.rows, self.tensors, self.left_out = [], [], dict(self.left_out)
        for (row, parameter, _), gradient in found:
            if gradient is None:
                self.absent += parameter.requires_grad
                self.absent_numbers += local(parameter).numel() if parameter.requires_grad else 0
                continue
            if gradient.layout is not torch.strided or is_wrapper_tensor(gradient):
                self.left_out[self._layers.table.layers[row].name] = _kind(gradient)
                continue
            self.rows.append(row)
            self.tensors.append(gradient)

    def release(self) -> None:
        """Let go of the tensors; what was computed of them stays."""
        self._released = [weakref.ref(tensor) for tensor in self.tensors]
        self.tensors.clear()  # the statistics have the same list

    def reclaim(self) -> None:
        """Hold the released tensors again, unless one of them is gone."""
        found = [tensor for released in self._released if (tensor := released()) is not None]
        if len(found) == len(self._released):
            self.tensors[:] = found

    def column(self, statistic: int) -> torch.Tensor | bytes:
        """Return one statistic (`statistics.NORM` ...), unscaled: (layers,) float32, packed bytes if on the host."""
        return self._statistics.column(statistic)

    @property
    def norms(self) -> torch.Tensor:
        """(layers,) float32: L2 norm of each gradient, unscaled."""
        return self._statistics.norms

    @property
    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(layers,) float32 each: smallest and largest element of each gradient, unscaled; NaN if any element is."""
        return self._statistics.extremes

    @property
    def nonfinite(self) -> torch.Tensor:
        """(layers,) float32: number of elements of each gradient that are NaN or infinite."""
        return self._statistics.nonfinite

    @property
    def smallest(self) -> torch.Tensor:
        """(layers,) float32: smallest finite magnitude over 0 in each gradient, unscaled; 0 where none is over 0."""
        return self._statistics.smallest

    @property
    def zeros(self) -> torch.Tensor:
        """(layers,) float32: number of elements of each gradient that are 0."""
        return self._statistics.zeros

    @property
    def one_pass(self) -> bool:
        """Whether one read gives all of these, so that one more of them costs nothing."""
        return not isinstance(self._statistics, TorchStatistics)

    @property
    def total(self) -> Scalar:
        """L2 norm over all layers, unscaled."""
        return self._statistics.total

    @functools.cached_property
    def sharded(self) -> Scalar | None:
        """L2 norm over the layers of which this rank holds a shard; None where it holds none. A shard that several
        ranks hold counts on one of them."""
        shards = self._layers.find_shards(self.rows)
        if shards is None:
            return None
        return combine_norms(
            self.norms[send_numbers(shards, torch.int64, self.norms.device)]
        )  # a list would wait for the device


def _part(parameter: torch.Tensor) -> Any:
    """Return this rank's part of the gradient. One that the ranks have not summed up yet stays a DTensor as it is."""
    gradient = parameter.grad
    return gradient if gradient is None or _is_partial(gradient) else local(gradient)


def _is_partial(gradient: torch.Tensor) -> bool:
    """Whether the gradient is a partial sum, as tensor parallelism has for replicas under `SequenceParallel`."""
    return any(one.is_partial() for one in getattr(gradient, "placements", ()) if hasattr(one, "is_partial"))


def _kind(gradient: torch.Tensor) -> str:
    if _is_partial(gradient):
        return "partial sums, which the ranks have yet to add up"
    return "sparse" if gradient.layout is not torch.strided else type(gradient).__name__
