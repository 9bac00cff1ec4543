"""How an incident stands: the values that programs compare, and the words for people."""

from __future__ import annotations

UNRESOLVED = "unresolved"
"""The state of what fired until its run was over."""

_WORDS = {"rolled_back": "rolled back", UNRESOLVED: "till the end"}
_FORMER = {"rolled back": "rolled_back", "till the end": UNRESOLVED}
"""As histories have it that were written before."""


def in_words(state: str) -> str:
    """The state as it stands in a sentence or a table."""
    return _WORDS.get(state, state)


def present(state: str) -> str:
    """The state as it is called now, of one that was read from a file."""
    return _FORMER.get(state, state)
