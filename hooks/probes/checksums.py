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
    """Of what trains and of what is frozen, as whole numbers under 2^24; and whether a frozen parameter has changed.

    One that is frozen and in the optimizer has no reason to. One that is in no optimizer may be somebody's moving
    average of the others: the two are told apart.
    """

    tier = 3

    def __init__(self) -> None:
        self._known: tuple[tuple[int, ...], torch.Tensor] | None = None
        """Rows of what was frozen at the last look, and its checksums."""

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None:
            return
        whole = [local(parameter) for row, parameter, _ in known.measured if row not in known.sharded]
        if whole:
            step.values["parameter_checksum"] = scalar(_sampled(whole).checksum())
            if known.replicated:
                step.values["replica_checksum"] = step.values["parameter_checksum"]
        if frozen := known.frozen():
            self._frozen(step, frozen)
        else:
            self._known = None

    def _frozen(self, step: Step, frozen: list[tuple[int, torch.Tensor, bool]]) -> None:
        sample = _sampled([part for _, part, _ in frozen])
        step.values["frozen_checksum"] = scalar(sample.checksum())
        rows, sums = tuple(row for row, _, _ in frozen), sample.checksums()
        before, self._known = self._known, (rows, sums)
        if before is None or before[0] != rows:  # others were frozen then
            return
        changed = before[1] != sums
        own = torch.tensor([held for _, _, held in frozen]).to(changed.device, non_blocking=True)
        numbers = torch.tensor(rows, dtype=torch.float32).to(changed.device, non_blocking=True)
        step.values["frozen_changed"] = scalar((changed & own).count_nonzero())
        step.values["frozen_moved"] = scalar((changed & ~own).count_nonzero())
        first = torch.where(changed, numbers, torch.inf).amin()
        step.values["frozen_changed_row"] = scalar(torch.where(changed.any(), first, -1.0))


def _sampled(parameters: list[torch.Tensor]) -> Sample:
    return Sample(parameters, row_length(len(parameters)))
