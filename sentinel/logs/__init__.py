"""Recorded runs of any origin: a log file in, rows of metrics out.

    path -> found -> read -> Recording -> chosen (which column is which metric) -> observations -> the rules

One file a format; each says whether a file is of its format by what is in it, and reads it. What cannot be read of a
log is counted and quoted (`Recording.faults`), and fatal only where nothing is left.
"""

from __future__ import annotations

from pathlib import Path

from sentinel.errors import LogError
from sentinel.logs import deepspeed, history, jsonl, megatron, table, tensorboard, trainer_state
from sentinel.logs.finding import Log, found
from sentinel.logs.naming import chosen
from sentinel.logs.recording import Recording
from sentinel.logs.text import head

__all__ = ["FORMATS", "Log", "Recording", "chosen", "found", "read"]

_READERS = (tensorboard, trainer_state, jsonl, table, megatron, deepspeed)
FORMATS = tuple(reader.NAME for reader in (history, *_READERS))


def read(path: Path) -> list[Recording]:
    """The runs in a file; in a folder of event files, one. Raises LogError, with the file and what is wrong."""
    if path.is_dir():
        return [tensorboard.read(path).checked()]
    first = head(path)
    if history.recognised(path, first):
        return history.read(path)
    for reader in _READERS:
        if reader.recognised(path, first):
            return [reader.read(path).checked()]
    raise LogError(f"{path}: not a log that can be read; formats: {', '.join(FORMATS)}")
