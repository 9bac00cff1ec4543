"""The advice of tools that examine a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from sentinel.text import rank_severity

Severity = Literal["critical", "warning", "info"]


class Advice(msgspec.Struct, frozen=True):
    """One finding in a snapshot or a checkpoint, and what to do about it."""

    severity: Severity
    what: str
    do: str


def sort_advice(given: Iterable[Advice]) -> list[Advice]:
    """Return the advice, the most severe first."""
    return sorted(given, key=lambda advice: -rank_severity(advice.severity))
