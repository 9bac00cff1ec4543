"""Explain numbers that 16 bits cannot hold, without NaN: too small gradients and updates; clipping too early."""

from __future__ import annotations

import statistics
from typing import Any

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import SAMPLE_MORE, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.signals import EXPONENTS, below
from sentinel.text import join_names

SMALLEST_NORMAL = -14
"""The exponent of two of fp16's smallest normal number."""
LARGEST_SCALE = 2.0**24
_KEPT = 0.1
"""Share of gradient elements that may stay under the smallest normal number."""
_DIGITS = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half of a format's last digit, relative to the number."""


@explains("GradientUnderflow")
def gradient_underflow(evidence: Evidence) -> Finding:
    """Find the layers, their share of small gradients at the present scale, and a scale that would be enough."""
    shares = {n: s for n, s in evidence.column("layer_grad_tiny_share").items() if n in evidence.members and s > 0.5}
    if not shares:
        return report_unknown("the share of small gradients by layer", command=SAMPLE_MORE)
    names, share = sorted(shares, key=lambda name: -shares[name]), statistics.median(shares.values())
    scale = evidence.latest("loss_scale") or 1.0
    told: dict[str, Any] = {"scale": scale, "layers": join_names(names, 5), "share": share}
    skips = [seq for seq, skipped in evidence.series("step_skipped")[-500:] if skipped == 1.0]
    wanted = _scale_that_keeps(evidence)
    if wanted is not None and wanted <= scale:  # the histogram is of all layers, most of which lose little
        wanted = None
    if len(skips) > 1 and wanted:
        return finding(evidence.alert, "held-down", skips=len(skips), steps=500, **told)
    would = f"; at a scale of {wanted:.0f} less than {_KEPT:.0%} of all gradients would be" if wanted else ""
    missing = () if wanted else ("the scale that would keep them: the histogram is of all layers, and sampled rarely",)
    return finding(evidence.alert, "scale-too-low", (), missing, would=would, wanted=wanted or 65536.0, **told)


def _scale_that_keeps(evidence: Evidence) -> float | None:
    """Return the least power of two as a scale at which nearly all gradients are normal numbers of fp16, by the
    histogram."""
    shares = [(exponent, evidence.latest(below(exponent))) for exponent in EXPONENTS]
    lost = [exponent for exponent, share in shares if share is not None and share <= _KEPT]
    return min(2.0 ** (SMALLEST_NORMAL - max(lost)), LARGEST_SCALE) if lost else None


@explains("LostUpdates")
def lost_updates(evidence: Evidence) -> Finding:
    """Quote the format of the weights, and the size of the updates against its last digit."""
    quoted, ratio = evidence.quote("share"), evidence.usual("update_ratio", most=3)
    share = quoted[0] if quoted else evidence.usual("lost_update_share", most=3)
    kinds = [layer.dtype.removeprefix("torch.") for layer in evidence.table if layer.trainable]
    if share is None or ratio is None or not kinds:
        return report_unknown("the format of the weights, and the size of the updates", command=SAMPLE_MORE)
    dtype = statistics.mode(kinds)
    worst = evidence.column("layer_lost_share")
    top = join_names([f"{n} ({worst[n]:.0%})" for n in sorted(worst, key=lambda n: -worst[n])], most=3)
    facts = (f"most are lost in {top}",) if worst else ()
    if dtype in _DIGITS:
        return finding(
            evidence.alert, "sixteen-bits", facts, dtype=dtype, ratio=ratio, digit=_DIGITS[dtype], share=share
        )
    rate = evidence.latest("learning_rate") or 0.0
    return finding(evidence.alert, "rate-too-small", facts, dtype=dtype, ratio=ratio, rate=rate, share=share)


@explains("ClipBeforeUnscale")
def clip_before_unscale(evidence: Evidence) -> Finding:
    """Quote the order of the calls, as code, and what is left of the limit."""
    limit, scale = evidence.latest("clip_limit"), evidence.latest("loss_scale")
    if limit is None or not scale:
        return report_unknown("the limit and the loss scale of that step", command=SAMPLE_MORE)
    return finding(evidence.alert, "order", limit=limit, left=limit / scale)
