"""Log files as lines and bytes: plain or gzipped, whatever the encoding makes of them."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path

from sentinel.errors import LogError

HEAD_BYTES = 1 << 16
HEAD_LINES = 200_000
"""Lines in which a trainer's own output must begin: launchers and NCCL write much before it."""
LONGEST_LINE = 1 << 24
"""Bytes. A few kB of an archive can be a line of gigabytes."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end). Raises LogError where the file cannot be read.

    A gzipped file that was cut off ends where it was cut, as those of killed jobs do.
    """
    count = 0
    try:
        with open_log(path) as file:
            for count, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
                if len(line) == LONGEST_LINE:
                    raise LogError(f"{path}: line {count} is longer than {LONGEST_LINE >> 20} MiB: no log")
                yield count, line.decode("utf-8-sig" if count == 1 else "utf-8", "replace").rstrip("\r\n")
    except EOFError:
        if not count:
            raise LogError(f"{path}: cannot be read: it is cut off at its start") from None
    except (OSError, zlib.error) as error:
        raise LogError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def plain(line: str) -> str:
    """A line of a terminal without its colours."""
    return _COLOURS.sub("", line) if "\x1b" in line else line


def head(path: Path) -> bytes:
    """The first bytes of the content. Raises LogError where the file cannot be read."""
    try:
        with open_log(path) as file:
            return file.read1(HEAD_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise LogError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def open_log(path: Path) -> BufferedReader | gzip.GzipFile:
    """Its content, unpacked where it is gzipped, whatever its name. Raises OSError."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if gzipped else path.open("rb")


def matches(path: Path, pattern: re.Pattern[str]) -> bool:
    """Whether a pattern is found before the log is too far in."""
    return any(pattern.search(line) for _, line in islice(lines(path), HEAD_LINES))


def seconds(text: str) -> float | None:
    """ISO 8601 as Unix seconds (local time where it names no zone); None where it is none."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        return None
