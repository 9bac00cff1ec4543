"""Tier 0: how long a step took, and where the time went."""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step


class StepTimes(Probe):
    """Host seconds, the means of the steps since the last sample: with a loader of four workers each fourth may wait.
    On CUDA a part shows how long launching took; only the whole step is the device's time, too."""

    relaxed = True

    def after(self, step: Step) -> None:
        values, tally, steps = step.values, step.tally, step.tally.steps
        parts = {"optimizer_seconds": (tally.optimizer_seconds + step.optimizer_seconds) / steps}
        if tally.data_seconds:
            parts["data_seconds"] = tally.data_seconds / steps
        if tally.forward_seconds:
            parts["forward_seconds"] = tally.forward_seconds / steps
        if tally.backward_seconds:
            parts["backward_seconds"] = tally.backward_seconds / steps
        values.update(parts)
        if step.previous_exit is not None:  # the first step has none: what came before it is the start of the script
            values["step_seconds"] = (step.left - step.previous_exit) / steps
            values["other_seconds"] = max(values["step_seconds"] - sum(parts.values()), 0.0)
