"""What trains, gets gradients, and is in no optimizer: it stands still, and the run does not say so.

It stands still by a checksum of a sample of it (`weights.py`): what a loop moves by itself, or by copies that its
optimizer holds, is none of these. Nor is what another optimizer of the process has, which may step rarely or later.
"""

from __future__ import annotations

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.tensors import Sample, row_length, scalar, send_numbers
from sentinel.signals import OPENING_STEPS

SPACING = 8
"""Steps between two looks in the first `OPENING_STEPS`; from then on it looks where tier 3 does."""


class OutsideOptimizer(Probe):
    """`parameters_outside`: how many; `outside_share`: their part of the numbers that train. Without any, no sample."""

    tier = 2

    def __init__(self) -> None:
        self._judged: frozenset[int] = frozenset()
        """Those for which other optimizers were looked for: that is a walk over all objects."""
        self._elsewhere: frozenset[int] = frozenset()
        self._known: tuple[list[int], torch.Tensor] | None = None
        """Those of the last look, and their checksums."""

    def before(self, step: Step) -> None:
        known = step.parameters
        if known is None or known.stream:  # the first one looks for all
            return
        if not step.rare and (step.seq % SPACING or step.seq >= OPENING_STEPS):
            return
        outside, trained = known.list_outside()
        if outside.keys() - self._judged:
            self._judged, self._elsewhere = self._judged | outside.keys(), discovery.list_steered()
        outside = {key: part for key, part in outside.items() if key not in self._elsewhere}
        before, self._known = self._known, None
        if outside:
            sums = Sample(list(outside.values()), row_length(len(outside))).checksums()
            self._known = list(outside), sums
            if before is not None and before[0] == self._known[0]:
                still = before[1] == sums
                sizes = send_numbers([part.numel() for part in outside.values()], torch.float32, sums.device)
                step.values["parameters_outside"] = scalar(still.count_nonzero())
                step.values["outside_share"] = scalar((still * sizes).sum() / max(trained, 1))
        elif before is not None:  # the optimizer was given them
            step.values["parameters_outside"] = 0.0
