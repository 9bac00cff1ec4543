"""Explain gradients that change along the depth of a network, or along the run."""

from __future__ import annotations

import math
from typing import Any

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import SAMPLE_MORE, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains

STEEP = 100.0
"""Ratio between the last layers' gradients and the first layers', either way, from which on depth is the cause. Healthy
networks stay within it (rules/stability.yaml)."""
_NOTHING = 0.01
"""Share of the first loss under which the loss counts as 0: all is learnt."""
_SHOWN = 6
"""Layers that a profile along depth names, from the first to the last."""
_BY_LAYER = "module.register_forward_hook on each layer, with output.norm()"
"""The call that gets activations: the hooks do not take them."""


@explains("ExplodingGradient")
def exploding(evidence: Evidence) -> Finding:
    """Decide whether gradients grow along depth, or along the run with the rate."""
    ratio = evidence.latest("gradient_depth_ratio")
    if ratio is not None and 0 < ratio < 1 / STEEP:
        return finding(evidence.alert, "depth", times=1 / ratio, **_ends(evidence))
    quoted, rates = evidence.quote("now", "early"), evidence.series("learning_rate")
    if quoted is not None and rates and quoted[1] > 0:
        low, (at, high) = rates[0][1], max(rates, key=lambda found: found[1])
        if high > 1.5 * low > 0:
            told: dict[str, Any] = {"low": low, "high": high, "at": evidence.step(at)}
            return finding(evidence.alert, "rate", times=quoted[0] / quoted[1], **told)
    return report_unknown("the norms of weights and activations by layer", *_unless(ratio), command=_BY_LAYER)


@explains("VanishingGradient")
def vanishing(evidence: Evidence) -> Finding:
    """Decide whether gradients vanish along depth, with the loss, or neither."""
    ratio = evidence.latest("gradient_depth_ratio")
    if ratio is not None and ratio > STEEP:
        return finding(evidence.alert, "depth", times=ratio, **_ends(evidence))
    losses = [loss for _, loss in evidence.series("loss") if math.isfinite(loss)]
    if losses and 0 <= losses[-1] < _NOTHING * losses[0]:
        return finding(evidence.alert, "learnt", loss=losses[-1], start=losses[0])
    return report_unknown("what is saturated: activations by layer", *_unless(ratio), command=_BY_LAYER)


@explains("WarmupMissing")
def warmup_missing(evidence: Evidence) -> Finding:
    """Quote the Post-LN layers, the rate that is full from the first step on, and the depth profile."""
    count, ratio = evidence.latest("post_norm_layers"), evidence.latest("gradient_depth_ratio")
    rate = evidence.latest("learning_rate")
    if count is None or ratio is None or rate is None:
        return report_unknown("the depth profile, and the rate", command=SAMPLE_MORE)
    facts = (f"gradient norms in the model's order: {_profile(evidence)}",)
    return finding(evidence.alert, "full-height", facts, count=count, ratio=ratio, rate=rate)


def _ends(evidence: Evidence) -> dict[str, Any]:
    matrices = _matrices(evidence)
    post = evidence.latest("post_norm_layers")
    return {
        "first": matrices[0][0] if matrices else "the first layers",
        "last": matrices[-1][0] if matrices else "the last",
        "post": f", in a Post-LN network ({post:.0f} normalisations follow a residual sum)" if post else "",
        "profile": _profile(evidence),
    }


def _profile(evidence: Evidence) -> str:
    matrices, last = _matrices(evidence), _SHOWN - 1
    shown = [matrices[round(i * (len(matrices) - 1) / last)] for i in range(_SHOWN)] if matrices else []
    return ", ".join(f"{name} {norm:.2g}" for name, norm in dict(shown).items())


def _matrices(evidence: Evidence) -> list[tuple[str, float]]:
    norms = evidence.column("layer_grad_norm")
    return [(layer.name, norms[layer.name]) for layer in evidence.table if len(layer.shape) > 1 and layer.name in norms]


def _unless(ratio: float | None) -> tuple[str, ...]:
    return () if ratio is not None else ("the gradients along depth: they are sampled now and then",)
