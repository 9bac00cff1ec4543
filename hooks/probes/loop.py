"""Tier 0: loss, loss scale, withheld steps and clipping, at every step; micro-batches and learning rate."""

from __future__ import annotations

import torch

from sentinel.hooks.probe import Probe, Step
from sentinel.hooks.tally import Scalar, scalar


class Outcome(Probe):
    """What the loop itself computes, and what it says by `monitor.log`."""

    spared = True

    def after(self, step: Step) -> None:
        values, tally = step.values, step.tally
        if tally.loss is not None:
            values["loss"] = tally.loss
        if step.scale is not None:
            values["loss_scale"] = step.scale
            values["step_skipped"] = step.skipped
        elif isinstance(step.skipped, torch.Tensor) or step.skipped:
            values["step_skipped"] = step.skipped
        if step.clip is not None:
            norm, values["clip_limit"] = step.clip
            if norm is not None:  # the loop has computed it anyway: it costs nothing, at any spacing of tier 1
                values["grad_norm"] = norm
        if tally.batch is not None:
            values.update(tally.batch)
        if tally.logged:
            values.update(tally.logged)


class LoopScalars(Probe):
    """How the loop is set: what changes little from step to step."""

    relaxed = True

    def after(self, step: Step) -> None:
        values, tally = step.values, step.tally
        values["micro_batches"] = float(tally.backwards)
        # Some Adafactors find their rate themselves, and have None here; optimizers of one's own may have none at all.
        rates = [rate for group in step.optimizer.param_groups if (rate := group.get("lr")) is not None]
        if rates:
            values["learning_rate"] = _highest(rates)
        if step.in_fp16:  # no sample elsewhere: most runs never have one
            values["fp16"] = 1.0
        if tally.evaluating:  # as above
            values["eval_mode"] = 1.0
        if tally.rivals:
            values["rival_loss"] = 1.0
        if tally.clipped_scaled:
            values["clipped_scaled"] = 1.0
        if tally.logged:
            values.update(tally.logged)


def _highest(rates: list[float | torch.Tensor]) -> Scalar:
    if len(rates) == 1 and type(rates[0]) is float:
        return rates[0]
    on_device = [rate for rate in rates if isinstance(rate, torch.Tensor) and rate.device.type != "cpu"]
    if on_device:  # capturable optimizers keep their rate there; a mixture of both kinds is nobody's
        return scalar(torch.stack(on_device).detach().max())
    return max(float(rate.detach() if isinstance(rate, torch.Tensor) else rate) for rate in rates)
