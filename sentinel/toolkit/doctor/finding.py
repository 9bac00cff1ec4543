"""What a finding is."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.text import rank_severity


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that `sentinel doctor` found before the training meets it."""

    name: str
    """Short and stable, for scripts."""
    severity: str
    """`critical`: it will not train as it is; `warning`: it costs, or fails under conditions; `info`: good to know."""
    what: str
    """With the numbers that say so."""
    why: str
    line: str
    """What to write."""
    source: str
    """Where it can be read."""


_CONSEQUENCES = (
    ("optimizer-holds-others", "no-gradient"),
    ("no-gradient", "unused-parameters"),
    ("scaled-step", "loss-not-finite"),
    ("frozen-batch-norm-learns", "frozen-in-optimizer"),
)
"""(cause, what follows from it and needs no word of its own)."""


def sort_findings(found: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """The most severe first, each name once, consequences of others left out."""
    unique = {finding.name: finding for finding in reversed(list(found))}
    for cause, consequence in _CONSEQUENCES:
        if cause in unique:
            unique.pop(consequence, None)
    return sorted(reversed(unique.values()), key=lambda finding: -rank_severity(finding.severity))
