"""Explain why there has been no good snapshot for long."""

from __future__ import annotations

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.diagnose.explanations import explains
from sentinel.text import join_names


@explains("SnapshotStale")
def snapshot_stale(evidence: Evidence) -> Finding:
    """Name what withholds snapshots now; else judge by what the ranks hold."""
    held = {number: rank.snapshots for number, rank in sorted(evidence.live.items()) if rank.state == "live"}
    facts = tuple(
        f"rank {number} holds {join_names([str(evidence.step(seq)) for seq in sorted(seqs)], 4) or 'none'}"
        for number, seqs in list(held.items())[:4]
    )
    if evidence.withheld_by:
        return finding(evidence.alert, "withheld", facts, rules=", ".join(evidence.withheld_by))
    without = [str(number) for number, seqs in held.items() if not seqs]
    if without:
        return finding(evidence.alert, "none-held", facts, ranks=join_names(without, 4))
    if held and not set.intersection(*held.values()):
        return finding(evidence.alert, "none-in-common", facts)
    return finding(evidence.alert, "not-good", facts)
