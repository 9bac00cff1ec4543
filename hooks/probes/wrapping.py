"""Tier 3: what the model is wrapped in."""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step


class Wrapping(Probe):
    """Devices of `nn.DataParallel`, where it is in use."""

    tier = 3

    def after(self, step: Step) -> None:
        if step.parameters is not None and (devices := step.parameters.scattered) is not None:
            step.values["data_parallel_devices"] = float(devices)
