"""A run's id from a name: directories, histories and metrics are named by it."""

from __future__ import annotations

import hashlib
import re

LIMIT = 40
"""Most characters of an id."""
_CHECKSUM = 8
"""Hexadecimal digits of the checksum in the id of a long name."""


def spell_id(text: str, limit: int = LIMIT) -> str:
    """Return `text` with only the characters that an id may have: letters, digits, `-`, `_`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:limit] or "run"


def shorten_id(text: str, limit: int = LIMIT) -> str:
    """Return the same; where `text` is longer or not ASCII, with a part of its checksum: other texts give other ids."""
    if text.isascii() and len(text) <= limit:
        return spell_id(text, limit)
    checksum = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_CHECKSUM]
    return f"{spell_id(text, limit - _CHECKSUM - 1)}-{checksum}"
