"""Tier 3: weights and what a step does to them, and gradients that are too small for a format.

All of it from a strided sample of weights and gradients (`hooks/torch_interop/strided_sample.py`): exact for small
tensors, else estimates.

    update            weight after the step less weight before
    update ratio      L2 norm of the update over that of the weight. About 1e-3 in a run that learns well; 0 in one
                      that learns nothing (A. Karpathy, CS231n: "ratio of weights:updates")
    lost update       the weight is the same after the step although its gradient is not 0: the update was less than
                      half of the weight's last digit, |update| < |weight| 2^-9 in bfloat16, and was rounded away
    exponents         cumulative histogram over all layers: the share of gradient elements under 2^-48, 2^-44 ... 1.
                      Under a loss scale S, fp16 makes 0 of what is under 2^-25 / S and takes digits from what is under
                      2^-14 / S: one histogram answers for every scale
"""

from __future__ import annotations

from typing import cast

import torch

from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.measure.probes.fp16_underflow import SMALLEST_NORMAL
from sentinel.hooks.torch_interop.layer_table import local
from sentinel.hooks.torch_interop.strided_sample import Sample, row_length, send_numbers
from sentinel.hooks.torch_interop.tensors import on_one_device, scalar
from sentinel.signals import EXPONENTS, below

_TINY = torch.finfo(torch.float32).tiny
"""Under a norm: weights that are 0 and stay so have a ratio of 0."""


class WeightUpdates(Probe):
    """Samples weights before and after a step, and its gradients in between, for the statistics of tier 3."""

    tier = 3

    def __init__(self) -> None:
        self._before: tuple[tuple[tuple[int, torch.Tensor, bool], ...], Sample] | None = None
        self._size: torch.Tensor | None = None
        """Magnitudes of the sampled gradients; infinite where there is none."""

    def enter(self, step: Step) -> None:
        self._before = self._size = None
        if step.parameters is not None and (measured := step.parameters.measured):
            self._before = tuple(measured), Sample([local(p) for _, p, _ in measured], row_length(len(measured)))

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if self._before is None or gradients is None or not gradients.tensors:
            return
        sample = Sample(gradients.tensors, row_length(len(self._before[0])))
        if gradients.scale is not None:
            sample.values /= gradients.scale.to(sample.values.device, torch.float32)
        size = sample.values.abs()
        size = self._size = torch.where(size > 0, size, torch.inf)  # what is 0, or no number, is under no bound
        smallest = size.amin(1)
        # The scale is on the device of the loss, which none of the gradients may be on.
        sizes, scale = on_one_device((size, step.scale if step.scale is not None else 1.0))
        tiny = cast("torch.Tensor", sizes < SMALLEST_NORMAL / scale).count_nonzero(1)
        # The compiled kernel has counted all elements already, in its one read.
        whole = gradients.one_pass
        step.layers["layer_grad_zero_share"] = _zeros(gradients) if whole else sample.zeros() / sample.counts
        step.layers["layer_grad_smallest"] = (
            gradients.smallest if whole else torch.where(smallest < torch.inf, smallest, 0)
        )
        step.layers["layer_grad_tiny_share"] = tiny / sample.counts.to(tiny.device, non_blocking=True)
        for exponent in EXPONENTS:
            under = (size < 2.0**exponent).count_nonzero(1)
            step.values[below(exponent)] = scalar(sample.estimate_total(under) / sample.size)

    def after(self, step: Step) -> None:
        before, size = self._before, self._size
        self._before = self._size = None
        if before is None or size is None or step.gradients is None or _withheld(step):
            return
        known, weights = before
        places = {row: place for place, (row, _, _) in enumerate(known)}
        chosen = [places[row] for row in step.gradients.rows if row in places]
        if len(chosen) < len(step.gradients.rows):  # the layer table changed within the step
            return
        after = Sample([local(known[place][1]) for place in chosen], size.shape[1])
        old = weights.values
        if len(chosen) < len(known):
            old = old.index_select(0, send_numbers(chosen, torch.int64, old.device))
        update = after.values - old
        moving = size < torch.inf
        lost, moving = (moving & (update == 0)).count_nonzero(1), moving.count_nonzero(1)
        norms = after.norms()
        moved = (update.square().sum(1) * after.weights).sqrt_()
        step.layers["layer_weight_norm"] = norms
        step.layers["layer_update_ratio"] = moved / norms.clamp(min=_TINY)
        step.layers["layer_lost_share"] = lost / moving.clamp(min=1)
        step.values["weight_norm"] = scalar(torch.linalg.vector_norm(norms))
        step.values["update_ratio"] = scalar(
            torch.linalg.vector_norm(moved) / torch.linalg.vector_norm(norms).clamp(min=_TINY)
        )
        step.values["lost_update_share"] = scalar(
            after.estimate_total(lost) / after.estimate_total(moving).clamp(min=1)
        )


def _zeros(gradients: Gradients) -> torch.Tensor:
    zeros = gradients.zeros
    return zeros / send_numbers([tensor.numel() for tensor in gradients.tensors], torch.float32, zeros.device)


def _withheld(step: Step) -> bool:
    """Known to be so. Where only the device knows, the step's updates are 0."""
    return isinstance(step.skipped, float) and step.skipped != 0.0
