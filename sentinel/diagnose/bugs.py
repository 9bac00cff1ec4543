"""Silent bugs of the loop."""

from __future__ import annotations

from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding


def frozen_changed(evidence: Evidence) -> Finding:
    """Which frozen parameter moved, and whether the optimizer has it."""
    rows = [int(row) for _, row in evidence.series("frozen_changed_row") if row >= 0]
    names = [layer.name for layer in evidence.table]
    if not rows or rows[-1] >= len(names):
        return Finding(NOT_KNOWN, "none", missing=("the names of the layers",))
    looks = [seq for seq, _ in evidence.series("frozen_changed")]
    since = f", after step {evidence.step(looks[-2])}" if len(looks) > 1 else ""
    if evidence.series("frozen_changed")[-1][1] > 0:
        why = "it is in the optimizer, which still moves it: momentum, weight decay, or a gradient that was left"
        return Finding(f"{names[rows[-1]]} is frozen and changed{since}; {why}", "medium")
    why = "it is in no optimizer: something else writes into it"
    return Finding(f"{names[rows[-1]]} is frozen and changed{since}; {why}", "medium")
