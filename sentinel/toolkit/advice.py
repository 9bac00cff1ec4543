"""What a tool that looks at a file says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from sentinel.text import rank_severity

Severity = Literal["critical", "warning", "info"]


class Advice(msgspec.Struct, frozen=True):
    """One thing to know of a snapshot or a checkpoint, and what to do."""

    severity: Severity
    what: str
    do: str


def sort_advice(given: Iterable[Advice]) -> list[Advice]:
    """The most severe first."""
    return sorted(given, key=lambda advice: -rank_severity(advice.severity))
