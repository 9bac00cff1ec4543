"""Tier 3: checksums of a strided sample of the parameters, after the step.

Replicas of a model (DDP) must have equal ones, and frozen parameters always the same one. Shards differ by their
nature and are left out. Of what trains other places are looked at each time, the same ones on all ranks.
"""

from __future__ import annotations

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.layer_table import local
from sentinel.hooks.torch_interop.strided_sample import Sample, checksum, row_length, send_numbers, short
from sentinel.hooks.torch_interop.tensors import scalar


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
        whole = {row: local(parameter) for row, parameter, _ in known.measured if row not in known.sharded}
        if whole:
            sums = _sums(list(whole.values()), step.seq)
            step.values["parameter_checksum"] = scalar(checksum(sums))
            if known.replicated:
                step.values["replica_checksum"] = step.values["parameter_checksum"]
                self._by_layer(step, list(whole), sums)
        if frozen := known.list_frozen():
            self._add_frozen(step, frozen)
        else:
            self._known = None

    def _by_layer(self, step: Step, rows: list[int], sums: torch.Tensor) -> None:
        """Of the layers that have statistics at this step."""
        places = {row: place for place, row in enumerate(rows)}
        wanted = step.gradients.rows if step.gradients is not None else []
        if wanted and places.keys() >= set(wanted):  # else the layer table changed within the step
            chosen = send_numbers([places[row] for row in wanted], torch.int64, sums.device)
            step.layers["layer_checksum"] = short(sums[chosen])

    def _add_frozen(self, step: Step, frozen: list[tuple[int, torch.Tensor, bool]]) -> None:
        sums = _sums([part for _, part, _ in frozen])
        step.values["frozen_checksum"] = scalar(checksum(sums))
        rows = tuple(row for row, _, _ in frozen)
        before, self._known = self._known, (rows, sums)
        if before is None or before[0] != rows:  # others were frozen then
            return
        changed = before[1] != sums
        own = send_numbers([held for _, _, held in frozen], torch.bool, changed.device)
        numbers = send_numbers(rows, torch.float32, changed.device)
        step.values["frozen_changed"] = scalar((changed & own).count_nonzero())
        step.values["frozen_moved"] = scalar((changed & ~own).count_nonzero())
        first = torch.where(changed, numbers, torch.inf).amin()
        step.values["frozen_changed_row"] = scalar(torch.where(changed.any(), first, -1.0))


def _sums(parameters: list[torch.Tensor], turn: int = 0) -> torch.Tensor:
    return Sample(parameters, row_length(len(parameters)), turn).checksums()
