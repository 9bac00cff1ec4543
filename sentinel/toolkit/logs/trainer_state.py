"""Reads `trainer_state.json` of the Hugging Face Trainer, or its `log_history` alone, or any other list of rows.

The Trainer masks a NaN loss: it logs 0.0, and only the gradient norm is NaN. Both are taken as they are; the rule
NonFiniteGradient finds the second. It also logs the infinite norm of a step that a scaler withheld, but not that it was
withheld: `Recording.observations` concludes that from the norms after it.
"""

from __future__ import annotations

from pathlib import Path

from sentinel.errors import LogError
from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.jsonl import parse_json
from sentinel.toolkit.logs.recording import Recording
from sentinel.toolkit.logs.text import lines

NAME = "trainer state"
HISTORY = "log_history"


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file is one JSON document that holds rows."""
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"[") and not (start.startswith(b"{") and b'"log_history"' in head):
        return False
    try:
        return _history(path) is not None
    except ValueError:
        return False


def read(path: Path) -> Recording:
    """Return all rows of a document. Raises LogError if it is not JSON, such as one that is cut off."""
    recording = Recording(path, NAME)
    try:
        history = _history(path) or []
    except ValueError as error:
        raise LogError(f"{path}: no JSON: {error}") from None
    for count, row in enumerate(history, 1):
        if isinstance(row, dict):
            rows.take(recording, count, row)
        else:
            recording.faults.add(1, f"entry {count} of {HISTORY} is no object")
    return recording


def _history(path: Path) -> list[object] | None:
    content = parse_json("\n".join(line for _, line in lines(path)))
    history = content.get(HISTORY) if isinstance(content, dict) else content
    return history if isinstance(history, list) else None
