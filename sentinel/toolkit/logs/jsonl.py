"""Reads JSON lines: one object per row, as `json.dumps`, exports of W&B and most home-made loggers write them.

NaN and Infinity are not JSON, but are read, too: bare, as Python writes them, or as strings.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.recording import Recording
from sentinel.toolkit.logs.text import lines

NAME = "JSON lines"

_decoder = msgspec.json.Decoder()


def recognise(path: Path, head: bytes) -> bool:
    """Whether the first line that is not blank is a complete object."""
    first, _, rest = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    try:
        return first.startswith(b"{") and isinstance(parse_json(first.decode()), dict)
    except ValueError:
        # A log of objects is recognised despite a bad first line; an object over several lines is not such a log.
        return bool(rest) and first.startswith(b'{"') and rest.lstrip().startswith(b'{"')


def parse_json(text: str) -> object:
    """Return the value of JSON text, which may have Python's NaN and Infinity. Raises ValueError."""
    try:
        try:
            return _decoder.decode(text)
        except msgspec.DecodeError:
            return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read(path: Path) -> Recording:
    """Return all rows of a file."""
    recording = Recording(path, NAME)
    for count, line in lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            recording.faults.add(count, f"no JSON: {getattr(error, 'msg', None) or error}")
            continue
        if isinstance(row, dict):
            rows.take(recording, count, row)
        else:
            recording.faults.add(count, "a JSON object is expected in each line")
    return recording
