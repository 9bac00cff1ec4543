"""Spikes of the loss and of the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding, times_usual
from sentinel.diagnose.signs import GrownLayer

_CLIP = "clip: torch.nn.utils.clip_grad_norm_(model.parameters(), {limit:.2g}) before optimizer.step(); lower the rate"
_DATA = "look at the batches of steps {first} to {last}; skip them (Rollback(skip_batches=...))"


def loss_spike(evidence: Evidence) -> Finding:
    """Whether the gradient moved before the loss, or with it: a broken update, or the batch."""
    gradient, loss = evidence.sign("grad_norm"), evidence.sign("loss")
    first, last = (
        evidence.step(evidence.signs[0].seq if evidence.signs else evidence.since),
        evidence.step(evidence.until),
    )
    look = _DATA.format(first=first, last=last)
    if gradient is None or loss is None:
        return Finding(NOT_KNOWN, "none", look, ("the gradient norm at the steps before the loss moved",))
    if gradient.seq < loss.seq:
        limit = gradient.usual if math.isfinite(gradient.usual) and gradient.usual > 0 else 1.0
        return Finding(
            f"an outsized update: the gradient norm was {times_usual(gradient)} its usual {loss.seq - gradient.seq} "
            f"step(s) before the loss moved, so the update of step {evidence.step(gradient.seq)} hurt the weights",
            "medium",
            f"{_CLIP.format(limit=limit)}; {look}",
            ("the update norm", "whether the batch of that step was bad, or the rate too high for a good one"),
        )
    return Finding(
        f"the batch of step {evidence.step(loss.seq)}: the loss jumped on it before any gradient had, "
        "and a loss is computed before its own update",
        "medium",
        look,
        ("the batch itself, to re-run it on the weights of the last snapshot",),
    )


def gradient_spike(evidence: Evidence) -> Finding:
    """Whether one layer makes it."""
    gradient = evidence.sign("grad_norm")
    limit = gradient.usual if gradient and gradient.usual > 0 else 1.0
    if _share_of_top(evidence.layers) > 0.9:
        where = f"one layer makes most of it: {evidence.layers[0].name}"
        return Finding(where, "medium", _CLIP.format(limit=limit), ("the batch of that step",))
    return Finding(NOT_KNOWN, "none", _CLIP.format(limit=limit), ("the batch of that step", "the update norm"))


def _share_of_top(layers: Sequence[GrownLayer]) -> float:
    squares = [layer.norm**2 for layer in layers if math.isfinite(layer.norm)]
    return max(squares) / sum(squares) if squares and sum(squares) > 0 else 0.0
