"""What the optimizer's second moments and the exponents of the gradients add to a diagnosis: facts, no cause."""

from __future__ import annotations

from sentinel.diagnose.evidence import Evidence
from sentinel.text import join_names

_OUT_OF_LINE = 10.0
"""Times the median over layers: an order of magnitude, by judgement. The noise of batches alone makes no such ratio."""
_SHOWN = 3


def out_of_line(evidence: Evidence) -> tuple[str, ...]:
    """Layers whose second moment is out of line with the rest, or that all of them are."""
    lines = []
    for rank, taken in sorted(evidence.moments.items())[:1]:
        whose = f" on rank {rank}" if len(evidence.live) > 1 else ""
        odd = [one for one in taken.layers if one.ratio > _OUT_OF_LINE * taken.usual > 0]
        if odd:
            names = join_names([f"{one.layer} ({one.ratio:.3g}x its gradient)" for one in odd], _SHOWN)
            lines.append(f"second moments out of line at step {evidence.step(taken.seq)}{whose}: {names}")
        elif taken.usual > _OUT_OF_LINE:
            at = f"at step {evidence.step(taken.seq)}{whose}"
            lines.append(f"second moments of all layers are {taken.usual:.3g}x their gradients {at}")
    return tuple(lines)
