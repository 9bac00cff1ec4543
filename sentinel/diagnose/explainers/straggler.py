"""Explain in which part of its step a rank is slow, on which host and GPU."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from sentinel.diagnose.evidence import ALL_STEPS, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.runs import Rank

STEPS = 20
"""Newest steps that are used. The rule fires when most of 30 are slow."""
_MOST = 0.5
"""Share of a rank's delay from which on one part of its step is the cause."""
_PARTS = {
    "data_seconds": ("waiting for its data", "look at its storage and its loader's workers"),
    "forward_seconds": ("its forward pass", "look for longer batches, else at clocks and heat of its GPU"),
    "optimizer_seconds": ("its optimizer", "look for state that moved to the host, and for swapping"),
    "other_seconds": ("its loop's own code", "look at what this rank alone does: logging, evaluation, checkpoints"),
}  # fmt: skip
"""Signal -> the part in words -> what to do. The backward pass is left out: it is where the others wait."""


@explains("Straggler")
def straggler(evidence: Evidence) -> Finding:
    """Find the rank that is most behind, by the rule's own numbers, and in which part of its step."""
    behind = {number: _behind(evidence.numbers.get(str(number), {})) for number in evidence.ranks}
    number = max(behind, key=lambda each: behind[each], default=None)
    rank = evidence.rank(number) if number is not None else None
    if number is None or rank is None or behind[number] <= 0:
        return report_unknown("the times of the ranks' last steps", command=f"{ALL_STEPS} --rank RANK")
    longer = f"{behind[number] * 1e3:.0f} ms a step longer than the quickest rank"
    cause = f"rank {number}, {_where(rank, evidence)}, takes {longer}"
    since = f"since step {evidence.step(evidence.since)}, or up to 30 before"
    excess = _excess(number, [step.ranks for step in evidence.steps if step.seq <= evidence.until][-STEPS:])
    facts = tuple(
        f"{_PARTS[each][0]}: {more * 1e3:+.1f} ms against the median of the others" for each, more in excess.items()
    )
    part = max(excess, key=lambda each: excess[each], default="")
    if not part or excess[part] < _MOST * behind[number]:
        return Finding(f"{cause}, {since}", "medium", "", ("which part of its step: none has half of that",), facts)
    name, remedy = _PARTS[part]
    return Finding(f"{cause}, mostly for {name}, {since}", "high", remedy, evidence=facts)


def _behind(numbers: Mapping[str, float]) -> float:
    """Return by how many seconds per step it is behind, outside the backward pass or outside both passes, whichever is
    more."""
    pairs = (("own", "quickest"), ("apart", "least_apart"))
    return max((numbers[own] - numbers[least] for own, least in pairs if {own, least} <= numbers.keys()), default=0.0)


def _excess(number: int, steps: list[Mapping[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return part -> by how many seconds this rank's median is over that of the others."""
    found = {}
    for part in _PARTS:
        own = [ranks[number][part] for ranks in steps if part in ranks.get(number, {})]
        others = [
            values[part] for ranks in steps for other, values in ranks.items() if other != number and part in values
        ]
        if own and others:
            found[part] = statistics.median(own) - statistics.median(others)
    return found


def _where(rank: Rank, evidence: Evidence) -> str:
    held = [gpu.index for gpu in evidence.devices.gpus.values() if gpu.uuid in rank.hello.gpus]
    gpus = f", GPU {', '.join(map(str, held))}" if held else ""
    return f"on {rank.identity.hostname or 'this host'}{gpus}"
