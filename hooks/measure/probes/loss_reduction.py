"""Whether the losses of several backward passes are divided by their number, as a mean over the whole batch wants.

The graph of a loss is read from its root on, node by node: no tensor is touched. Only what is sure is told: where the
root is a mean over its micro-batch (`MeanBackward0`, `NllLossBackward0` of reduction `mean`, ...), with nothing but
additions before it. Any product or quotient may be the normalisation, and a graph that cannot be read (a compiled loss,
a function of somebody's own) may hold one.
"""

from __future__ import annotations

from typing import Any

import torch

from sentinel.hooks.loop.losses import is_scaled
from sentinel.hooks.measure.probe import Probe, Step

NODES = 8
BLIND_PASSES = 4
"""Where no loader was seen, passes that are taken for micro-batches: two or three may be the halves of a GAN's loss."""

_MEAN = 1
"""Of torch's enumeration of reductions; `sum` is 2."""
_MEANS = ("MeanBackward", "NllLoss", "MseLoss", "BinaryCrossEntropy", "HuberLoss", "SmoothL1Loss")
_TRANSPARENT = ("AddBackward", "SubBackward", "ToCopyBackward", "ViewBackward", "SqueezeBackward", "CloneBackward")


class LossReduction(Probe):
    """`unnormalised_passes`: backward passes of a step, where no loss of them is divided; elsewhere none."""

    relaxed = True

    def __init__(self) -> None:
        self._seen = self._plain = 0

    def pass_begins(self, roots: Any) -> None:
        self._seen += 1
        if self._plain == self._seen - 1 and isinstance(roots, torch.Tensor):
            self._plain += is_plain_mean(roots.grad_fn, scaled=is_scaled(roots))

    def over(self, step: Step) -> None:
        totals = step.totals
        all_plain = totals.backwards == self._seen == self._plain
        loaded = totals.batches == self._seen if totals.batches else totals.forwards == self._seen >= BLIND_PASSES
        again = step.passes_before is not None  # a closure, which clears the gradients and runs the same batch again
        if self._seen > 1 and all_plain and loaded and not again and not totals.weighted:
            step.values["unnormalised_passes"] = float(self._seen)
        self._seen = self._plain = 0


def is_plain_mean(node: Any, *, scaled: bool) -> bool:
    """Whether a graph is known to begin with means and sums alone. `scaled`: its first product is GradScaler's."""
    if scaled and node is not None and node.name().startswith("MulBackward"):
        node = node.next_functions[0][0]
    waiting = [node]
    for _ in range(NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if node is None:  # a constant
            continue
        name = node.name()
        if name.startswith(_TRANSPARENT):
            waiting += [below for below, _ in node.next_functions]
        elif not name.startswith(_MEANS) or getattr(node, "_saved_reduction", _MEAN) != _MEAN:
            return False
    return not waiting
