"""What trains, gets gradients, and is in no optimizer: it stands still, and the run does not say so.

It stands still by a checksum of a sample of it (`weights.py`): what a loop moves by itself, or by copies that its
optimizer holds, is none of these. Nor is what another optimizer of the process has, which may step rarely or later, nor
what has the gradient of an earlier stage only, which stays as it is.
"""

from __future__ import annotations

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.tensors import Sample, row_length, scalar, send_numbers
from sentinel.signals import OPENING_STEPS

SPACING = 8
"""Steps between two looks in the first `OPENING_STEPS`, and until there were as many as the rule needs: a busy machine
may leave no time for some. From then on it looks where tier 3 does."""
CONFIRMING_LOOK = 4
"""At which other optimizers are looked for once more: one may be made after the first steps. The rule wants as many."""


class OutsideOptimizer(Probe):
    """`parameters_outside`: how many; `outside_share`: their part of the numbers that train. Without any, no sample."""

    tier = 2

    def __init__(self) -> None:
        self._judged: frozenset[int] = frozenset()
        """Those for which other optimizers were looked for: that is a walk over all objects."""
        self._elsewhere: frozenset[int] = frozenset()
        self._known: tuple[list[int], torch.Tensor, torch.Tensor] | None = None
        """Those of the last look, their checksums, and those of their gradients."""
        self._looks = 0

    def before(self, step: Step) -> None:
        known = step.parameters
        if known is None or known.stream:  # the first one looks for all
            return
        # The first look has nothing to compare with.
        close = step.seq < OPENING_STEPS or self._looks <= CONFIRMING_LOOK
        if not step.rare and (step.seq % SPACING or not close):
            return
        outside, trained = known.list_outside()
        self._looks += 1
        if outside.keys() - self._judged or (outside and self._looks == CONFIRMING_LOOK):
            self._judged, self._elsewhere = self._judged | outside.keys(), discovery.list_steered()
        outside = {key: parts for key, parts in outside.items() if key not in self._elsewhere}
        before, self._known = self._known, None
        if outside:
            each, parts, gradients = row_length(len(outside)), *zip(*outside.values(), strict=True)
            sums, changes = Sample(parts, each).checksums(), Sample(gradients, each).checksums()
            self._known = list(outside), sums, changes
            if before is not None and before[0] == self._known[0]:
                still = (before[1] == sums) & (before[2] != changes)
                sizes = send_numbers([part.numel() for part in parts], torch.float32, sums.device)
                step.values["parameters_outside"] = scalar(still.count_nonzero())
                step.values["outside_share"] = scalar((still * sizes).sum() / max(trained, 1))
        elif before is not None:  # the optimizer was given them
            step.values["parameters_outside"] = 0.0
