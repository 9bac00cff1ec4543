"""Which ranks have fewer batches than others."""

from __future__ import annotations

from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding
from sentinel.diagnose.ranks import UNEVEN, named

_LENGTH = "loader_batches"


def uneven(evidence: Evidence) -> Finding:
    """By how many batches their loaders have, the fewest first."""
    told = [step for step in evidence.steps if _LENGTH in step.run and step.seq <= evidence.until]
    if not told:
        return Finding(NOT_KNOWN, "none", missing=("the loaders' lengths: the steps are not in memory any more",))
    lengths: dict[int, list[int]] = {}
    for number, values in sorted(told[-1].ranks.items()):
        if _LENGTH in values:
            lengths.setdefault(int(values[_LENGTH]), []).append(number)
    shortest = min(lengths)
    facts = tuple(f"{named(ranks)}: {batches} batches an epoch" for batches, ranks in sorted(lengths.items()))
    cause = (
        f"{named(lengths[shortest])} will be through after {shortest} batches, {named(lengths[max(lengths)])} after "
    )
    cause += f"{max(lengths)}: a loop that goes by epochs hangs then"
    return Finding(cause, "high", f"{UNEVEN}. Where the loop counts its steps nothing will happen", evidence=facts)
