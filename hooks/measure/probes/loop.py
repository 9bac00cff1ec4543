"""Reads what the loop sets and computes: loss, loss scale, clipping, learning rate and schedule; and its times.

`LrSchedule`: whether the scheduler was stepped before the first step, so that each rate comes one step too early. Only
the first step shows it: from then on `scheduler.step(); optimizer.step()` and the right order look alike. Schedulers
are looked for only where the rate differs from the one at attach; the scheduler's own count says how often it was
stepped. One that was stepped several times was set to where a resumed run goes on. And where the rate is 0 after some
steps: how often its scheduler was stepped by then.
"""

from __future__ import annotations

from typing import Any

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.tensors import Scalar, scalar


class StepOutcome(Probe):
    """Values that the loop itself computes, and those that it passes to `monitor.log`."""

    skipped_on_fast_path = True

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
            norm, values["clip_limit"], _ = step.clip
            if norm is not None:  # the loop computed it anyway: so it is free, whatever tier 1's spacing
                values["grad_norm"] = norm
        if totals.batch is not None:
            values.update(totals.batch)
        if totals.logged:
            values.update(totals.logged)


class LoopScalars(Probe):
    """Settings of the loop, which change little from step to step."""

    relaxed = True

    def after(self, step: Step) -> None:
        values, totals = step.values, step.totals
        values["micro_batches"] = float(totals.backwards)
        # Some Adafactors find their rate themselves, and have None here; custom optimizers may have no rate at all.
        rates = [rate for group in step.optimizer.param_groups if (rate := group.get("lr")) is not None]
        if rates:
            values["learning_rate"] = _highest(rates)
        if step.in_fp16:  # otherwise no sample: most runs never have one
            values["fp16"] = 1.0
        if totals.evaluating:  # else no sample, as for fp16
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
    if on_device:  # capturable optimizers keep their rate on a device; none mixes both kinds
        return scalar(torch.stack(on_device).detach().max())
    return max(float(rate.detach() if isinstance(rate, torch.Tensor) else rate) for rate in rates)


class StepTimes(Probe):
    """Host seconds without our own measuring, as means over the steps since the last sample: with a loader of four
    workers every fourth step may wait.

    On CUDA a part is the time that launching took; only the whole step is the device's time, too."""

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
        if step.previous_exit is not None:  # None at the first step: what came before it is the script's start
            values["step_seconds"] = max(step.left - step.previous_exit - step.own_seconds, 0.0) / steps
            values["other_seconds"] = max(values["step_seconds"] - sum(parts.values()), 0.0)


_ONCE = 2
"""`_step_count` of a scheduler that was stepped once by the user: it steps once itself when it is made."""
_LOOK = 8
"""Step after which a rate of 0 is examined: a warm-up's first rate may be 0, and SchedulerMisused fires at 16."""


class LrSchedule(Probe):
    """`scheduler_first`: the rate that the schedule has for the first step; no sample where the step had it.
    `scheduler_steps`: how often the scheduler was stepped; -1: no scheduler; no sample where the rate is over 0."""

    tier = 3

    def __init__(self, optimizer: Any) -> None:
        """Note the rates at attach."""
        self._planned = _rates(optimizer)
        self._early = False

    def enter(self, step: Step) -> None:
        if step.seq == 0:
            moved = self._planned and _rates(step.optimizer) != self._planned and not step.optimizer.state
            self._early = bool(moved) and _was_scheduler_stepped(step.optimizer)

    def after(self, step: Step) -> None:
        if step.seq == 0 and self._early:
            step.values["scheduler_first"] = max(self._planned, default=0.0)

    def disarm(self, step: Step) -> None:
        if step.seq == _LOOK:
            rates = [group.get("lr") for group in step.optimizer.param_groups]
            if all(isinstance(rate, float | int) and rate == 0 for rate in rates):
                _, schedulers = discovery.bystanders([step.optimizer])
                counts = [getattr(one, "_step_count", 1) - 1 for one in schedulers]
                step.values["scheduler_steps"] = float(max(counts, default=-1))


def _rates(optimizer: Any) -> list[float]:
    """Return the rates of groups that a scheduler sets; a rate on a device is left out."""
    groups = [group for group in optimizer.param_groups if "initial_lr" in group]
    return [group["lr"] for group in groups if isinstance(group["lr"], float)]


def _was_scheduler_stepped(optimizer: Any) -> bool:
    _, schedulers = discovery.bystanders([optimizer])
    return any(getattr(one, "_step_count", 0) == _ONCE and getattr(one, "last_epoch", 0) > 0 for one in schedulers)
