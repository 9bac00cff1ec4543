"""Explain which ranks have fewer batches than others."""

from __future__ import annotations

from sentinel.diagnose.evidence import ALL_STEPS, Evidence, Finding, report_unknown
from sentinel.diagnose.explainers.ranks import UNEVEN
from sentinel.diagnose.explanations import explains
from sentinel.text import name_ranks

_LENGTH = "loader_batches"


@explains("UnevenBatches")
def uneven(evidence: Evidence) -> Finding:
    """Compare how many batches the ranks' loaders have, the fewest first."""
    told = [step for step in evidence.steps if _LENGTH in step.run and step.seq <= evidence.until]
    if not told:
        return report_unknown("the loaders' lengths: the steps are not in memory any more", command=ALL_STEPS)
    lengths: dict[int, list[int]] = {}
    for number, values in sorted(told[-1].ranks.items()):
        if _LENGTH in values:
            lengths.setdefault(int(values[_LENGTH]), []).append(number)
    shortest = min(lengths)
    facts = tuple(f"{name_ranks(ranks)}: {batches} batches an epoch" for batches, ranks in sorted(lengths.items()))
    first, last = name_ranks(lengths[shortest]), name_ranks(lengths[max(lengths)])
    cause = f"{first} will be through after {shortest} batches, {last} after {max(lengths)}: a loop that goes by epochs"
    cause += " hangs then"
    return Finding(
        cause,
        "high",
        f"{UNEVEN}. Where the loop counts its steps nothing will happen",
        evidence=facts,
        ranks=tuple(lengths[shortest]),
    )
