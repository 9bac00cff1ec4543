"""Tier 2: norm, minimum, maximum and non-finite elements of each parameter's gradient."""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step


class LayerStatistics(Probe):
    """Statistics of each gradient, as the optimizer gets it: after clipping, unscaled."""

    tier = 2

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None or not gradients.tensors:
            return
        step.layers["layer_grad_norm"] = gradients.norms
        step.layers["layer_grad_min"], step.layers["layer_grad_max"] = gradients.extremes
        step.layers["layer_nonfinite"] = gradients.nonfinite
