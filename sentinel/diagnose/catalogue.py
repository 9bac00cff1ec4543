"""From evidence to cause. A diagnosis says how sure it is and what is missing: wrong certainty is worse than none.

One function an alert; an alert without one gets what its rule says of it and the cause "not known".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from sentinel.diagnose.signs import GrownLayer, Sign
from sentinel.runs import Step

Confidence = Literal["high", "medium", "low", "none"]

NOT_KNOWN = "not known"


class Evidence(msgspec.Struct, frozen=True):
    """What is known of an incident when it fires. Steps are seqs."""

    alert: str
    since: int
    until: int
    signs: Sequence[Sign]
    layers: Sequence[GrownLayer]
    last: Step
    """The step at which it fired."""
    before: Step | None
    """The step before the first sign."""
    step_offset: int = 0

    def sign(self, signal: str) -> Sign | None:
        """The onset of one signal."""
        return next((sign for sign in self.signs if sign.signal == signal), None)

    def step(self, seq: int) -> int:
        """The user's step of a seq."""
        return seq + self.step_offset


class Diagnosis(msgspec.Struct, frozen=True):
    """Cause, how sure, the numbers that say so, what to do, and what would be needed to know more."""

    cause: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    missing: tuple[str, ...] = ()


def diagnosed(evidence: Evidence, remedy: str) -> Diagnosis:
    """The diagnosis of an incident. `remedy` is what the rule itself says to do."""
    explain = _CATALOGUE.get(evidence.alert)
    facts = _facts(evidence)
    missing = () if evidence.layers else ("layer statistics of these steps: they are sampled, and none fell here",)
    if explain is None:
        return Diagnosis(NOT_KNOWN, "none", facts, remedy, missing)
    cause, confidence, own_remedy, own_missing = explain(evidence)
    return Diagnosis(cause, confidence, facts, own_remedy or remedy, (*own_missing, *missing))


_Finding = tuple[str, Confidence, str, tuple[str, ...]]

_CLIP = "clip: torch.nn.utils.clip_grad_norm_(model.parameters(), {limit:.2g}) before optimizer.step(); lower the rate"
_DATA = "look at the batches of steps {first} to {last}; skip them (Rollback(skip_batches=...))"


def _loss_spike(evidence: Evidence) -> _Finding:
    gradient, loss = evidence.sign("grad_norm"), evidence.sign("loss")
    first, last = (
        evidence.step(evidence.signs[0].seq if evidence.signs else evidence.since),
        evidence.step(evidence.until),
    )
    look = _DATA.format(first=first, last=last)
    if gradient is None or loss is None:
        return NOT_KNOWN, "none", look, ("the gradient norm at the steps before the loss moved",)
    if gradient.seq < loss.seq:
        limit = gradient.usual if math.isfinite(gradient.usual) and gradient.usual > 0 else 1.0
        return (
            f"an outsized update: the gradient norm was {_times(gradient)} its usual {loss.seq - gradient.seq} "
            f"step(s) before the loss moved, so the update of step {evidence.step(gradient.seq)} hurt the weights",
            "medium",
            f"{_CLIP.format(limit=limit)}; {look}",
            ("the update norm", "whether the batch of that step was bad, or the rate too high for a good one"),
        )
    return (
        f"the batch of step {evidence.step(loss.seq)}: the loss jumped on it before any gradient had, "
        "and a loss is computed before its own update",
        "medium",
        look,
        ("the batch itself, to re-run it on the weights of the last snapshot",),
    )


def _gradient_spike(evidence: Evidence) -> _Finding:
    gradient = evidence.sign("grad_norm")
    limit = gradient.usual if gradient and gradient.usual > 0 else 1.0
    if _share_of_top(evidence.layers) > 0.9:
        where = f"one layer makes most of it: {evidence.layers[0].name}"
        return where, "medium", _CLIP.format(limit=limit), ("the batch of that step",)
    return NOT_KNOWN, "none", _CLIP.format(limit=limit), ("the batch of that step", "the update norm")


def _nonfinite_loss(evidence: Evidence) -> _Finding:
    loss, gradient = evidence.sign("loss"), evidence.sign("grad_norm")
    at = loss.seq if loss else evidence.since
    nonfinite_at = evidence.since
    if gradient and gradient.seq < nonfinite_at and not math.isfinite(gradient.value):
        return (
            f"weights poisoned by step {evidence.step(gradient.seq)}: its backward made non-finite gradients, "
            "and the optimizer applied them",
            "high",
            "roll back or restore a checkpoint from before that step: every weight that got a NaN keeps it; "
            "then find what made it: torch.autograd.set_detect_anomaly(True) on the batch of that step",
            ("the module that made it",),
        )
    if at < nonfinite_at or (gradient and gradient.seq < nonfinite_at):
        first = min(sign.seq for sign in evidence.signs)
        return (
            f"divergence: loss or gradient norm had left their past at step {evidence.step(first)}, "
            f"{nonfinite_at - first} step(s) before the loss overflowed",
            "high",
            "go back to before the first sign; lower the rate or lengthen the warm-up; clip the gradients",
            (),
        )
    return (
        f"the forward pass of step {evidence.step(nonfinite_at)} made it, out of the blue: a non-finite or extreme "
        "value in the batch, or log, sqrt or a division at the edge of its domain",
        "medium",
        f"check the inputs of step {evidence.step(nonfinite_at)} with torch.isfinite; add an epsilon to log, sqrt "
        "and divisions; in fp16 keep the loss in fp32",
        ("the first module that made it: needs a re-run of the batch",),
    )


def _nonfinite_gradient(evidence: Evidence) -> _Finding:
    loss = evidence.last.run.get("loss", math.nan)
    if math.isfinite(loss):
        return (
            f"the backward pass of step {evidence.step(evidence.since)} made it: the loss of that step is finite "
            f"({loss:.4g})",
            "high",
            "look for sqrt, norm, log or a division whose derivative is infinite at 0; "
            "torch.autograd.set_detect_anomaly(True) on that batch names the function; a GradScaler skips such steps",
            ("the function that made it: needs a re-run of the batch",),
        )
    return (
        f"the loss of step {evidence.step(evidence.since)} is not finite, and its gradients with it",
        "high",
        "see NonFiniteLoss: the forward pass made it",
        (),
    )


_CATALOGUE: dict[str, Callable[[Evidence], _Finding]] = {
    "LossSpike": _loss_spike,
    "GradientSpike": _gradient_spike,
    "NonFiniteLoss": _nonfinite_loss,
    "NonFiniteGradient": _nonfinite_gradient,
}


def _facts(evidence: Evidence) -> tuple[str, ...]:
    lines = [
        f"{sign.signal} left its past at step {evidence.step(sign.seq)}: {sign.value:.4g}, usually {sign.usual:.4g}"
        for sign in evidence.signs
    ]
    broken = [layer for layer in evidence.layers if layer.nonfinite]
    if broken:
        names = ", ".join(layer.name for layer in broken[:5])
        lines.append(f"{len(broken)} layer(s) with non-finite gradients: {names}{', ...' if len(broken) > 5 else ''}")
    elif evidence.layers:
        top = ", ".join(f"{layer.name} ({_ratio(layer.ratio)})" for layer in evidence.layers[:5])
        lines.append(f"{len(evidence.layers)} layer(s) grew over their own past, most of all {top}")
    scale = evidence.last.run.get("loss_scale")
    if scale is not None:
        lines.append(f"loss scale {scale:g}")
    if "clip_limit" in evidence.last.run:
        lines.append(f"gradients are clipped to {evidence.last.run['clip_limit']:g}")
    return tuple(lines)


def _share_of_top(layers: Sequence[GrownLayer]) -> float:
    squares = [layer.norm**2 for layer in layers if math.isfinite(layer.norm)]
    return max(squares) / sum(squares) if squares and sum(squares) > 0 else 0.0


def _times(sign: Sign) -> str:
    return _ratio(sign.value / sign.usual) if sign.usual > 0 else f"{sign.value:.3g} against {sign.usual:.3g},"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}x" if math.isfinite(ratio) else "out of all proportion to"
