"""Finds trainable parameters that get gradients and are in no optimizer: they stand still, and nothing else shows it.

A parameter stands still by a checksum of a sample of it (`weights.py`): one that the loop moves by itself, or by copies
that its optimizer holds, does not count. Nor does one that another optimizer of the process has, which may step rarely
or later, nor one that has only the gradient of an earlier stage, which does not change.
"""

from __future__ import annotations

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.tensors import Sample, row_length, scalar, send_numbers
from sentinel.signals import OPENING_STEPS

SPACING = 8
"""Steps between two looks in the first `OPENING_STEPS`, and until there were as many looks as the rule needs: a busy
machine may leave no time for some. Afterwards, it looks where tier 3 is sampled."""
CONFIRMING_LOOK = 4
"""The look at which other optimizers are searched once more: one may be made late. The rule wants as many looks."""


class OutsideOptimizer(Probe):
    """`parameters_outside`: their number; `outside_share`: their share of all trainable elements. No sample if none."""

    tier = 2

    def __init__(self) -> None:
        self._judged: frozenset[int] = frozenset()
        """Ids of parameters for which other optimizers were searched, which is a walk over all objects."""
        self._elsewhere: frozenset[int] = frozenset()
        self._known: tuple[list[int], torch.Tensor, torch.Tensor] | None = None
        """Ids of the parameters at the last look, their checksums, and those of their gradients."""
        self._looks = 0

    def before(self, step: Step) -> None:
        known = step.parameters
        if known is None or known.stream:  # the first optimizer's probe covers all
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
        elif before is not None:  # they were added to the optimizer since
            step.values["parameters_outside"] = 0.0
