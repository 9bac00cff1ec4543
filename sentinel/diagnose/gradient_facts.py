"""What the numbers say of the gradients, for rules to which layers matter."""

from __future__ import annotations

import math

from sentinel.diagnose.evidence import Evidence, ratio_text


def gradient_facts(evidence: Evidence) -> tuple[str, ...]:
    """What left its past first, which layers grew or broke, how gradients are scaled and clipped."""
    lines = [
        f"{sign.signal} left its past at step {evidence.step(sign.seq)}: {sign.value:.4g}, usually {sign.usual:.4g}"
        if not math.isnan(sign.usual)
        else f"{sign.signal} is {sign.value:.4g} at step {evidence.step(sign.seq)}, and has no past"
        for sign in evidence.signs
    ]
    broken = [layer for layer in evidence.layers if layer.nonfinite]
    if broken:
        names = ", ".join(layer.name for layer in broken[:5])
        lines.append(f"{len(broken)} layer(s) with non-finite gradients: {names}{', ...' if len(broken) > 5 else ''}")
    elif evidence.layers:
        top = ", ".join(f"{layer.name} ({ratio_text(layer.ratio)})" for layer in evidence.layers[:5])
        lines.append(f"{len(evidence.layers)} layer(s) grew over their own past, most of all {top}")
    scale = evidence.last.run.get("loss_scale")
    if scale is not None:
        lines.append(f"loss scale {scale:g}")
    if "clip_limit" in evidence.last.run:
        lines.append(f"gradients are clipped to {evidence.last.run['clip_limit']:g}")
    return tuple(lines)
