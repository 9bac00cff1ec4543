"""Tier 0: loss, loss scale, withheld steps and clipping, at every step; micro-batches and learning rate.

Tier 0: how long a step took, and where the time went.
"""

from __future__ import annotations

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.tensors import Scalar, scalar


class StepOutcome(Probe):
    """What the loop itself computes, and what it says by `monitor.log`."""

    spared = True

    def after(self, step: Step) -> None:
        values, totals = step.values, step.totals
        if totals.loss is not None:
            values["loss"] = totals.loss
        if step.scale is not None:
            values["loss_scale"] = step.scale
            values["step_skipped"] = step.skipped
        elif isinstance(step.skipped, torch.Tensor) or step.skipped:
            values["step_skipped"] = step.skipped
        if step.clip is not None:
            norm, values["clip_limit"] = step.clip
            if norm is not None:  # the loop has computed it anyway: it costs nothing, at any spacing of tier 1
                values["grad_norm"] = norm
        if totals.batch is not None:
            values.update(totals.batch)
        if totals.logged:
            values.update(totals.logged)


class LoopScalars(Probe):
    """How the loop is set: what changes little from step to step."""

    relaxed = True

    def after(self, step: Step) -> None:
        values, totals = step.values, step.totals
        values["micro_batches"] = float(totals.backwards)
        # Some Adafactors find their rate themselves, and have None here; optimizers of one's own may have none at all.
        rates = [rate for group in step.optimizer.param_groups if (rate := group.get("lr")) is not None]
        if rates:
            values["learning_rate"] = _highest(rates)
        if step.in_fp16:  # no sample elsewhere: most runs never have one
            values["fp16"] = 1.0
        if totals.evaluating:  # as above
            values["eval_mode"] = 1.0
        if totals.rivals:
            values["rival_loss"] = 1.0
        if totals.reinforcement:
            values["reinforcement_learning"] = 1.0
        if totals.clipped_scaled:
            values["clipped_scaled"] = 1.0
        if totals.logged:
            values.update(totals.logged)


def _highest(rates: list[float | torch.Tensor]) -> Scalar:
    if len(rates) == 1 and type(rates[0]) is float:
        return rates[0]
    on_device = [rate for rate in rates if isinstance(rate, torch.Tensor) and rate.device.type != "cpu"]
    if on_device:  # capturable optimizers keep their rate there; a mixture of both kinds is nobody's
        return scalar(torch.stack(on_device).detach().max())
    return max(float(rate.detach() if isinstance(rate, torch.Tensor) else rate) for rate in rates)


class StepTimes(Probe):
    """Host seconds without those that took our own measuring, the means of the steps since the last sample: with a
    loader of four workers each fourth may wait.
    On CUDA a part shows how long launching took; only the whole step is the device's time, too."""

    relaxed = True

    def after(self, step: Step) -> None:
        values, totals, steps = step.values, step.totals, step.totals.steps
        parts = {"optimizer_seconds": (totals.optimizer_seconds + step.optimizer_seconds) / steps}
        if totals.data_seconds:
            parts["data_seconds"] = totals.data_seconds / steps
        if totals.forward_seconds:
            parts["forward_seconds"] = totals.forward_seconds / steps
        if totals.backward_seconds:
            parts["backward_seconds"] = totals.backward_seconds / steps
        values.update(parts)
        if step.previous_exit is not None:  # the first step has none: what came before it is the start of the script
            values["step_seconds"] = max(step.left - step.previous_exit - step.own_seconds, 0.0) / steps
            values["other_seconds"] = max(values["step_seconds"] - sum(parts.values()), 0.0)
