"""Tier 3: layers that are frozen and learn nevertheless: their running statistics move with every batch.

`requires_grad_(False)` stops the weights of a batch norm, and `model.train()` goes on updating its running mean and
variance; what the layer computes in evaluation is then another thing than what was frozen.
"""

from __future__ import annotations

import weakref

from torch import nn

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.internals import NormWithStatistics
from sentinel.hooks.torch_interop.layer_table import Layers, named_parameters


class FrozenStatistics(Probe):
    """How many frozen normalisations update their statistics; absent in a model without any that is frozen."""

    tier = 3

    def __init__(self) -> None:
        self._norms: list[weakref.ref[nn.Module]] | None = None
        """All that keep running statistics and have weights."""
        self._rows: dict[int, int] = {}

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None or known.stream:
            return
        if self._norms is None:
            self._norms = [
                weakref.ref(module)
                for model in known.models
                for module in model.modules()
                if isinstance(module, NormWithStatistics) and module.running_mean is not None and module.affine
            ]
        norms = [module for ref in self._norms if (module := ref()) is not None]
        frozen = [norm for norm in norms if not any(parameter.requires_grad for parameter in norm.parameters())]
        if not frozen:
            return
        moving = [norm for norm in frozen if norm.training]
        step.values["frozen_statistics"] = float(len(moving))
        if moving:
            step.values["frozen_statistics_row"] = float(self._row(known, moving[0]))

    def _row(self, known: Layers, norm: nn.Module) -> int:
        """The layer-table row of its weight; -1 where it has none."""
        key = id(norm.weight)
        if key not in self._rows:
            rows = (row for row, (_, _, p) in enumerate(named_parameters(known.models)) if p is norm.weight)
            self._rows[key] = next(rows, -1)
        return self._rows[key]
