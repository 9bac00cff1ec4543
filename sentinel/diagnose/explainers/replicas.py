"""Explain which rank holds other parameters than the rest, since when, in which layers."""

from __future__ import annotations

from collections import Counter

from sentinel.diagnose.evidence import ALL_STEPS, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.text import format_count, join_names, name_ranks

CHECKSUM = "replica_checksum"
SHOWN_LAYERS = 8


@explains("ReplicaDivergence")
def divergence(evidence: Evidence) -> Finding:
    """Find the ranks that differ from the majority, and the last step at which all were equal."""
    told = [step for step in evidence.steps if CHECKSUM in step.run and step.seq <= evidence.until]
    if not told:
        return report_unknown("the ranks' checksums: the steps are not in memory any more", command=ALL_STEPS)
    sums = {number: values[CHECKSUM] for number, values in told[-1].ranks.items() if CHECKSUM in values}
    (most, held), *_ = Counter(sums.values()).most_common()
    others = sorted(number for number, value in sums.items() if value != most)
    equal = [step.seq for step in told[:-1] if len({values.get(CHECKSUM) for values in step.ranks.values()}) == 1]
    since = f"after step {evidence.step(equal[-1])}" if equal else "since the run began, or before it was looked at"
    facts, missing = _layers(evidence, told[-1].seq)
    if 2 * held <= len(sums):
        by_value = [sorted(rank for rank in sums if sums[rank] == value) for value in dict.fromkeys(sums.values())]
        cause = f"{name_ranks(sorted(sums))} hold different parameters, {since}; nothing shows which is right"
        if len(by_value) == 2 < len(sums):
            one, other = map(name_ranks, by_value)
            cause = f"{one} hold other parameters than {other}, {since}; nothing shows which is right"
        return Finding(cause, "medium", missing=missing, evidence=facts)
    cause = f"{name_ranks(others)} hold{'s' * (len(others) == 1)} other parameters than the other {held}, {since}"
    return Finding(cause, "high", missing=missing, evidence=facts, ranks=tuple(others))


def _layers(evidence: Evidence, seq: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is known of the layers, and what is missing."""
    apart = evidence.differing.get(seq, ())
    if not apart:
        return (), ("which layers: none of those that had a gradient at that step, or it is not in memory any more",)
    many = format_count(len(apart), "layer")
    shown = join_names(apart, SHOWN_LAYERS)
    return (f"at step {evidence.step(seq)} {many} {'differs' if len(apart) == 1 else 'differ'}: {shown}",), ()
