"""Tier 0, at every step: loss, micro-batches, learning rate, loss scale, withheld steps, clipping."""

from __future__ import annotations

import torch

from sentinel.hooks.probe import Probe, Step
from sentinel.hooks.tally import Scalar, scalar


class LoopScalars(Probe):
    """What the loop itself computes and says, taken at the exit of the step."""

    tier = 0

    def after(self, step: Step) -> None:
        values, tally = step.values, step.tally
        if tally.loss is not None:
            values["loss"] = tally.loss
        values["micro_batches"] = float(tally.backwards)
        values["learning_rate"] = _highest([group["lr"] for group in step.optimizer.param_groups])
        if step.scale is not None or isinstance(step.skipped, torch.Tensor) or step.skipped:
            values["step_skipped"] = step.skipped
        if step.in_fp16:  # no sample elsewhere: most runs never have one
            values["fp16"] = 1.0
        if tally.evaluating:  # as above
            values["eval_mode"] = 1.0
        if tally.batch is not None:
            values.update(tally.batch)
        if step.scale is not None:
            values["loss_scale"] = step.scale
        if tally.clipped_scaled:
            values["clipped_scaled"] = 1.0
        if step.clip is not None:
            norm, values["clip_limit"] = step.clip
            if norm is not None:  # the loop has computed it anyway: it costs nothing, at any spacing of tier 1
                values["grad_norm"] = norm
        values.update(tally.logged)


def _highest(rates: list[float | torch.Tensor]) -> Scalar:
    if len(rates) == 1 and type(rates[0]) is float:
        return rates[0]
    on_device = [rate for rate in rates if isinstance(rate, torch.Tensor) and rate.device.type != "cpu"]
    if on_device:  # capturable optimizers keep their rate there; a mixture of both kinds is nobody's
        return scalar(torch.stack(on_device).max())
    return max(float(rate) for rate in rates)
