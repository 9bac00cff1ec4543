"""Tier 0: how long the step took, and where the time went."""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step


class StepTimes(Probe):
    """Host seconds. On CUDA a part shows how long launching took; only the whole step is the device's time, too."""

    tier = 0

    def after(self, step: Step) -> None:
        values, tally = step.values, step.tally
        own = step.left - step.entered
        if step.passes_before is not None:
            own = max(own - (tally.passes_seconds - step.passes_before), 0.0)
        parts = {"optimizer_seconds": own}
        if tally.batches:
            parts["data_seconds"] = tally.data_seconds
        if tally.forwards:
            parts["forward_seconds"] = tally.forward_seconds
        if tally.backwards:
            parts["backward_seconds"] = tally.backward_seconds
        values.update(parts)
        if step.previous_exit is not None:  # the first step has none: what came before it is the start of the script
            values["step_seconds"] = step.left - step.previous_exit
            values["other_seconds"] = max(values["step_seconds"] - sum(parts.values()), 0.0)
