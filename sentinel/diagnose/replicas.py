"""Which rank holds other parameters than the rest."""

from __future__ import annotations

from collections import Counter

from sentinel.diagnose.evidence import NOT_KNOWN, Evidence, Finding

CHECKSUM = "replica_checksum"


def divergence(evidence: Evidence) -> Finding:
    """The ranks that differ from most, and the last step at which all were equal."""
    told = [step for step in evidence.steps if CHECKSUM in step.run and step.seq <= evidence.until]
    if not told:
        return Finding(NOT_KNOWN, "none", missing=("the ranks' checksums: the steps are not in memory any more",))
    sums = {number: values[CHECKSUM] for number, values in told[-1].ranks.items() if CHECKSUM in values}
    (most, held), *_ = Counter(sums.values()).most_common()
    others = sorted(number for number, value in sums.items() if value != most)
    equal = [step.seq for step in told[:-1] if len({values.get(CHECKSUM) for values in step.ranks.values()}) == 1]
    since = f"after step {evidence.step(equal[-1])}" if equal else "since the run began, or before it was looked at"
    if 2 * held <= len(sums):
        ranks = ", ".join(map(str, sorted(sums)))
        return Finding(f"ranks {ranks} hold different parameters, {since}; which is right cannot be told", "medium")
    named = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    return Finding(
        f"{named} hold{'s' * (len(others) == 1)} other parameters than the other {held}, {since}",
        "high",
        missing=("which layers: checksums are taken over all of them",),
    )
