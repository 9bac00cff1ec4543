"""Facts about gradients and the optimizer's second moments that are added to a diagnosis."""

from __future__ import annotations

import math

from sentinel.diagnose.evidence import Evidence, ratio_text
from sentinel.text import format_count, join_names

_OUT_OF_LINE = 10.0
"""Factor over the median of the layers: an order of magnitude, by judgement. The noise of batches alone makes no such
ratio."""
_SHOWN = 3


def describe_gradients(evidence: Evidence) -> tuple[str, ...]:
    """Return facts for rules about layers: what left its past first, which layers grew or broke, how gradients are
    scaled and clipped."""
    lines = [
        f"{sign.signal} was unusual at step {evidence.step(sign.seq)}: {sign.value:.4g}, usually {sign.usual:.4g}"
        if not math.isnan(sign.usual)
        else f"{sign.signal} is {sign.value:.4g} at step {evidence.step(sign.seq)}, and has no past"
        for sign in evidence.signs
    ]
    broken = [layer for layer in evidence.layers if layer.nonfinite]
    if broken:
        names = join_names([layer.name for layer in broken], 5)
        many = format_count(len(broken), "layer")
        lines.append(f"{many} with non-finite gradients: {names}")
    elif evidence.layers:
        top = ", ".join(f"{layer.name} ({ratio_text(layer.ratio)})" for layer in evidence.layers[:5])
        lines.append(
            f"{format_count(len(evidence.layers), 'layer')} with larger gradients than before, most of all {top}"
        )
    scale = evidence.last.run.get("loss_scale")
    if scale is not None:
        lines.append(f"loss scale {scale:g}")
    if "clip_limit" in evidence.last.run:
        lines.append(f"gradients are clipped to {evidence.last.run['clip_limit']:g}")
    return tuple(lines)


def describe_second_moments(evidence: Evidence) -> tuple[str, ...]:
    """Return facts about layers whose second moment is out of line with the rest, or about all second moments where
    they are out of line with their gradients."""
    lines = []
    for rank, taken in sorted(evidence.moments.items())[:1]:
        whose = f" on rank {rank}" if evidence.world_size > 1 else ""
        odd = [one for one in taken.layers if one.ratio > _OUT_OF_LINE * taken.usual > 0]
        if odd:
            names = join_names([f"{one.layer} ({one.ratio:.3g}x its gradient)" for one in odd], _SHOWN)
            lines.append(f"second moments out of line at step {evidence.step(taken.seq)}{whose}: {names}")
        elif taken.usual > _OUT_OF_LINE:
            at = f"at step {evidence.step(taken.seq)}{whose}"
            lines.append(f"second moments of all layers are {taken.usual:.3g}x their gradients {at}")
    return tuple(lines)
