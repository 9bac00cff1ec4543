"""JSON lines: an object a row, as `json.dumps` writes them, W&B exports them and most home-made loggers do.

NaN and Infinity are no JSON, and are read all the same: bare, as Python writes them, or as strings.
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
    """Whether its first line that is not blank is an object, whole."""
    first, _, rest = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    try:
        return first.startswith(b"{") and isinstance(parse_json(first.decode()), dict)
    except ValueError:
        # One bad line must not make a log of objects something else; an object over several lines is.
        return bool(rest) and first.startswith(b'{"') and rest.lstrip().startswith(b'{"')


def parse_json(text: str) -> object:
    """JSON, with Python's NaN and Infinity. Raises ValueError."""
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read(path: Path) -> Recording:
    """All rows."""
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
