"""Tier 3: checksums of a strided sample of the parameters, after the step.

Replicas of a model (DDP) must have equal ones, and frozen parameters the same one for ever. Shards differ by their
nature and are left out.
"""

from __future__ import annotations

import torch

from sentinel.hooks.layers import local
from sentinel.hooks.probe import Probe, Step
from sentinel.hooks.sample import Sample, row_length
from sentinel.hooks.tally import scalar


class Checksums(Probe):
    """Of what trains and of what is frozen, as whole numbers under 2^24."""

    tier = 3

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None:
            return
        whole = [parameter for row, parameter, _ in known.measured if row not in known.sharded]
        for name, parameters in (
            ("parameter_checksum", [local(parameter) for parameter in whole]),
            ("frozen_checksum", known.frozen()),
        ):
            if parameters:
                step.values[name] = scalar(_checksum(parameters))
        if whole and known.replicated:
            step.values["replica_checksum"] = step.values["parameter_checksum"]


def _checksum(parameters: list[torch.Tensor]) -> torch.Tensor:
    return Sample(parameters, row_length(len(parameters))).checksum()
