"""Spikes of the loss and of the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sentinel.diagnose.causes import finding
from sentinel.diagnose.drift import huge_gradient
from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding, times_usual
from sentinel.diagnose.signs import GrownLayer

_GROWN = 5.0
"""Growth that counts, and the root of the largest: a step at the new direction moves the other layers, too."""
_CLIP = "clip: torch.nn.utils.clip_grad_norm_(model.parameters(), {limit:.2g}) before optimizer.step(); lower the rate"


def loss_spike(evidence: Evidence) -> Finding:
    """Whether the gradient moved before the loss, or with it: a broken update, or the batch."""
    gradient, loss = evidence.sign("grad_norm"), evidence.sign("loss")
    first = evidence.step(evidence.signs[0].seq if evidence.signs else evidence.since)
    batches: dict[str, Any] = {"first": first, "last": evidence.step(evidence.until)}
    if gradient is None or loss is None:
        look = "look at the batches of steps {first} to {last}; skip them (Rollback(skip_batches=...))"
        missing = ("the gradient norm at the steps before the loss moved",)
        return Finding(NOT_KNOWN, "none", look.format(**batches), missing)
    if gradient.seq < loss.seq:
        limit = gradient.usual if math.isfinite(gradient.usual) and gradient.usual > 0 else 1.0
        steps, at = loss.seq - gradient.seq, evidence.step(gradient.seq)
        return finding(
            evidence.alert, "update", times=times_usual(gradient), steps=steps, at=at, limit=limit, **batches
        )
    if (outlier := huge_gradient(evidence, loss.seq)) is not None:
        return finding(evidence.alert, "moments", since=evidence.step(loss.seq), **outlier)
    return finding(evidence.alert, "batch", at=evidence.step(loss.seq), **batches)


def gradient_spike(evidence: Evidence) -> Finding:
    """Where it comes in: one layer, or all up to one."""
    gradient = evidence.sign("grad_norm")
    limit = gradient.usual if gradient and gradient.usual > 0 else 1.0
    at = evidence.step(gradient.seq if gradient else evidence.since)
    if _share_of_top(evidence.layers) > 0.9:
        return finding(evidence.alert, "one-layer", layer=evidence.layers[0].name, at=at, limit=limit)
    if (layer := _last_that_grew(evidence)) is not None:
        return finding(evidence.alert, "comes-in", layer=layer, limit=limit)
    return Finding(NOT_KNOWN, "none", _CLIP.format(limit=limit), ("the batch of that step", "the update norm"))


def _last_that_grew(evidence: Evidence) -> str | None:
    """The module up to which all layers grew, and after which none did."""
    there = evidence.column("layer_grad_norm")
    order = [layer.name for layer in evidence.table if layer.name in there]
    growth = {layer.name: layer.ratio for layer in evidence.layers}
    bound = max(_GROWN, math.sqrt(max(growth.values(), default=1.0)))
    grew = [growth.get(name, 1.0) >= bound for name in order]
    count = sum(grew)
    if not 0 < count < len(order) or not all(grew[:count]):
        return None
    return order[count - 1].rpartition(".")[0] or order[count - 1]


def _share_of_top(layers: Sequence[GrownLayer]) -> float:
    squares = [layer.norm**2 for layer in layers if math.isfinite(layer.norm)]
    return max(squares) / sum(squares) if squares and sum(squares) > 0 else 0.0
