"""The state of a run's rules and rollbacks in the history, for a daemon that takes over (`restoration.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from sentinel._version import __version__
from sentinel.actions.rollback_state import SavedRollbacks
from sentinel.daemon.run.opening_report import OpeningReport
from sentinel.engine import LAYOUT, Rule


class SavedState(msgspec.Struct):
    """The state of a run's rules and rollbacks."""

    digest: str
    """Digest of the rules that have this state."""
    rules: bytes
    rollbacks: SavedRollbacks
    rewound_at: int
    clock: tuple[float, float] | None = None
    stages: int = 0
    """Number of announced stages that had begun."""
    opening: OpeningReport | None = None


def digest(rules: Sequence[Rule]) -> str:
    """Return a digest of the rules' text, the version, and the layout of states: a saved state must match it."""
    parts = [__version__, str(LAYOUT), *(rule.text for rule in rules)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
