"""Measures the size of gradients: over all layers, per layer, with depth, and against the range of fp16.

`GradientDepth`: gradients explode or vanish from layer to layer. Of the weight matrices, in the model's order, the
first (usually an embedding) and the last (the head) are left out. Of each other gradient the root mean square is taken;
the ratio is the median of these over the last quarter of the matrices, divided by that over the first. In a healthy
run it lies between 0.01 and 100, whatever the model's depth and loss.
"""

from __future__ import annotations

import torch

from sentinel.hooks.measure import statistics
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.tensors import meeting_place, scalar, send_numbers


class GradientNorm(Probe):
    """L2 norm over all of the optimizer's gradients, before and after clipping; `no_gradient` if there are none."""

    tier = 1

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None:
            return
        if not gradients.rows:
            if step.totals.backwards and not gradients.left_out:
                step.values["no_gradient"] = 1.0
            return
        step.values["grad_norm_applied"] = gradients.total
        if gradients.sharded is not None:
            step.values["grad_norm_applied_sharded"] = gradients.sharded
        if step.clip is not None and step.clip.norm is not None:
            if gradients.sharded is not None:
                # The norm that clipping computed already covers the shards of all ranks.
                step.values["grad_norm_sharded"] = 0.0
            return
        for name, part in (("grad_norm", gradients.total), ("grad_norm_sharded", gradients.sharded)):
            norm = part if part is None or step.clip is None else step.clip.find_norm_before(part)
            if norm is not None:
                step.values[name] = norm


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
        step.values["without_gradient_share"] = _share_without(gradients, step.parameters)
        if not gradients.rows:
            return
        for signal, statistic in _COLUMNS.items():
            step.layers[signal] = gradients.column(statistic)


def _share_without(gradients: Gradients, parameters: Layers | None) -> float:
    if not gradients.absent or parameters is None:
        return 0.0
    return gradients.absent_numbers / sum(local(p).numel() for _, p, _ in parameters.measured if p.requires_grad)


FEWEST = 8
"""Least number of matrices between the first and the last for a ratio over depth."""
_LEAST = 1e-30
"""Smallest divisor, for models in which no gradient at all reaches the first quarter."""


class GradientDepth(Probe):
    """`gradient_depth_ratio`: over 1 where gradients shrink on their way to the first layers. It is 1 where the last
    quarter has no gradient at all, such as with dead last layers: then nothing is known about depth."""

    tier = 2

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None
        """(places, 1 / sqrt(elements)) of the first quarter, then of the last."""

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None or not gradients.rows or step.parameters is None:
            return
        norms = gradients.norms
        if gradients.rows != self._rows:
            self._rows, self._ends = gradients.rows, _ends(gradients.rows, step.parameters.measured, norms.device)
        if self._ends is None:
            return
        places, factors = self._ends
        sizes = (norms.index_select(0, places) * factors).reshape(2, -1)
        # Layers without a gradient (a gate that is 0, a new adapter) say nothing about depth.
        first, last = _medians(torch.where(sizes > 0, sizes, torch.nan)).nan_to_num(0.0).unbind()
        ratio = last.clamp(min=_LEAST) / first.clamp(min=_LEAST)
        step.values["gradient_depth_ratio"] = scalar(torch.where(last > 0, ratio, 1.0))


def _medians(rows: torch.Tensor) -> torch.Tensor:
    """Return the lower median of each row, without NaN elements; NaN where all are NaN. `nanmedian` has no
    deterministic kernel on CUDA, and raises in a run that asked for deterministic algorithms."""
    middle = (rows.isnan().logical_not_().sum(1, keepdim=True) - 1).clamp_(min=0) // 2
    return rows.sort(1).values.gather(1, middle).squeeze(1)


def _ends(
    rows: list[int], measured: list[tuple[int, torch.Tensor, bool]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    parameters = {row: parameter for row, parameter, _ in measured}
    matrices = [place for place, row in enumerate(rows) if row in parameters and parameters[row].dim() > 1][1:-1]
    if len(matrices) < FEWEST:
        return None
    quarter = len(matrices) // 4
    chosen = [*matrices[:quarter], *matrices[-quarter:]]
    factors = [local(parameters[rows[place]]).numel() ** -0.5 for place in chosen]
    return send_numbers(chosen, torch.int64, device), send_numbers(factors, torch.float32, device)


BUDGET = 1 << 18
"""Most elements that are sampled in one step, spread over all gradients."""
SMALLEST_NORMAL = 2.0**-14
"""Smallest normal number of fp16. Smaller ones have fewer than its 11 digits, and under 2^-25 none."""


class Fp16Underflow(Probe):
    """Shares of sampled gradient elements that are 0, and of those too small for all their digits.

    An upper bound: some are 0 for other reasons (a ReLU that is off, an embedding that was not used).
    """

    tier = 2

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None or not gradients.tensors or step.scale is not None or not step.in_fp16:
            return
        each = max(1, BUDGET // len(gradients.tensors))
        flat = [tensor.view(-1) for tensor in gradients.tensors if tensor.is_contiguous()]
        if not flat:
            return
        device = meeting_place(flat)
        parts = [one[:: -(-one.numel() // each)].to(device, non_blocking=True) for one in flat]
        sample = torch.cat(parts).abs()
        zero = sample == 0
        step.values["grad_zero_share"] = scalar(zero.float().mean())
        step.values["grad_tiny_share"] = scalar(((sample < SMALLEST_NORMAL) & ~zero).float().mean())
