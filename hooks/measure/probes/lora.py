"""Tier 3: whether low-rank adapters (LoRA) learn: how large B is beside A. B begins at 0, and with it what they do."""

from __future__ import annotations

from typing import Any

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.tensors import scalar

_TINY = 1e-30
_LOOKED_AT = 8
"""Adapters whose spectrum is taken: two products of r x r matrices with the sides of the layer, each."""


class LoraAdapters(Probe):
    """`adapter_ratio`: median over the adapters of the root mean square of B over that of A. Without adapters none.

    `adapter_rank_used`: how many directions of B A share what it does, the participation ratio of its squared singular
    values s: (sum s)^2 / sum s^2, from 1 to the rank. Both sums are traces of products of r x r matrices, and so it
    takes no decomposition, which would wait for the device.
    """

    tier = 3

    def __init__(self) -> None:
        self._ids: frozenset[int] = frozenset()
        """Of the parameters that the pairs were found among."""
        self._pairs: list[tuple[Any, Any]] = []

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None:
            return
        if known.ids is not self._ids:
            self._ids, self._pairs = known.ids, _pairs(known)
        if self._pairs:
            parts = [local(one) for pair in self._pairs for one in pair]
            sizes = torch.stack([part.float().square().mean().sqrt() for part in parts]).reshape(-1, 2)
            step.values["adapter_rank_used"] = scalar(
                torch.stack([*map(_measure_rank, self._pairs[:_LOOKED_AT])]).median()
            )
            step.values["adapter_ratio"] = scalar((sizes[:, 1] / sizes[:, 0].clamp(min=_TINY)).median())


def _measure_rank(pair: tuple[Any, Any]) -> torch.Tensor:
    """Of A (r, inputs) and B (outputs, r). 0 where B is 0."""
    a, b = (local(one).float() for one in pair)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:  # of a convolution, or a shard
        return a.new_zeros(())
    size = b.square().mean().sqrt().clamp(min=_TINY)  # or its fourth power would be no number
    product = ((b / size).T @ (b / size)) @ (a @ a.T)
    total = product.diagonal().sum()
    return total.square() / (product * product.T).sum().clamp(min=_TINY)


def _pairs(known: Layers) -> list[tuple[Any, Any]]:
    """(A, B) of each adapter that trains, by PEFT's names."""
    named = {known.table.layers[row].name: p for row, p, _ in known.measured if p.requires_grad and local(p).numel()}
    found = [(a, named.get(name.replace("lora_A", "lora_B"))) for name, a in named.items() if "lora_A" in name]
    devices = {a.device for a, _ in found}
    return [(a, b) for a, b in found if b is not None] if len(devices) == 1 else []
