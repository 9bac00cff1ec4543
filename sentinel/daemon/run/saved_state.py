"""What the history keeps of a run's judgement, for a daemon that takes over (`restoration.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from sentinel._version import __version__
from sentinel.actions.rollback_state import Saved
from sentinel.daemon.run.opening_report import OpeningReport
from sentinel.engine import LAYOUT, Rule


class SavedState(msgspec.Struct):
    """What is kept, beside what the history is about."""

    digest: str
    """Of the rules that have this state."""
    rules: bytes
    rollbacks: Saved
    rewound_at: int
    clock: tuple[float, float] | None = None
    stages: int = 0
    """How many of the announced stages had begun."""
    opening: OpeningReport | None = None


def digest(rules: Sequence[Rule]) -> str:
    """Of the rules' text, the version, and how states are laid out: what a state must fit to."""
    parts = [__version__, str(LAYOUT), *(rule.text for rule in rules)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
