"""Tier 2: how many batches a pass over the loader has, where all ranks must take as many steps."""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step


class LoaderLength(Probe):
    """Said where it is known. Ranks that run out of batches early leave the others waiting in a collective."""

    tier = 2

    def after(self, step: Step) -> None:
        batches = step.tally.loader_batches
        if batches >= 0 and step.parameters is not None and step.parameters.lockstep:
            step.values["loader_batches"] = float(batches)
