"""How a rank died that said no goodbye: what is left of it is what it was doing."""

from __future__ import annotations

from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding
from sentinel.diagnose.ranks import named
from sentinel.runs import Rank

NEAR_LIMIT = 0.9
"""Resident memory over the limit of the machine or the cgroup, from which the OOM killer is likely."""
_STATUS = "its exit status: the launcher's log has it (a signal is -9, or 137)"


def rank_lost(evidence: Evidence) -> Finding:
    """The first that died; the launcher ends the others soon after it."""
    dead = [rank for number in evidence.ranks if (rank := evidence.rank(number)) is not None]
    if not dead:
        return Finding(NOT_KNOWN, "none", missing=("the rank is gone",))
    first = min(dead, key=lambda rank: rank.last_seq)
    number = first.identity.rank
    facts = [
        f"rank {number}, process {first.identity.pid} on {first.identity.hostname}, reported step "
        f"{evidence.step(first.last_seq)} last" + (f", in the phase {first.phase!r}" if first.phase else ""),
    ]
    if others := tuple(rank.identity.rank for rank in dead if rank is not first):
        facts.append(f"{named(others)} ended after it")
    share = _memory_share(evidence, first)
    if share is not None:
        facts.append(f"its resident memory was {share:.0%} of the limit")
    if share is not None and share > NEAR_LIMIT:
        remedy = "give it more memory, or fewer loader workers; dmesg says `Out of memory: Killed process` if it was so"
        return Finding(f"rank {number} died, at the limit of memory", "medium", remedy, (_STATUS,), tuple(facts))
    return Finding(f"rank {number} died; of what is {NOT_KNOWN}", "low", "", (_STATUS,), tuple(facts))


def _memory_share(evidence: Evidence, rank: Rank) -> float | None:
    """Resident memory over the limit, when it was read last."""
    limit = rank.hello.facts.get("memory_limit_bytes")
    used = evidence.series("rss_bytes", rank.identity.rank)
    return used[-1][1] / limit if used and isinstance(limit, int) and limit > 0 else None
