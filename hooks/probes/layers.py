"""Tier 2: norm, minimum, maximum and non-finite elements of each gradient; parameters that got none."""

from __future__ import annotations

from sentinel.hooks import statistics
from sentinel.hooks.probe import Probe, Step

_COLUMNS = {
    "layer_grad_norm": statistics.NORM,
    "layer_grad_min": statistics.LOW,
    "layer_grad_max": statistics.HIGH,
    "layer_nonfinite": statistics.NONFINITE,
}


class LayerStatistics(Probe):
    """Statistics of each gradient, as the optimizer gets it: after clipping, unscaled."""

    tier = 2

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None:
            return
        step.values["parameters_without_gradient"] = float(gradients.absent)
        if not gradients.rows:
            if step.tally.backwards and not gradients.left_out:
                step.values["no_gradient"] = 1.0
            return
        for signal, statistic in _COLUMNS.items():
            step.layers[signal] = gradients.column(statistic)
