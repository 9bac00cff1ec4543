"""Reads log files as lines and bytes: plain or gzipped; bytes that are no UTF-8 are replaced."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sentinel.errors import LogError

HEAD_BYTES = 1 << 16
HEAD_LINES = 200_000
"""Lines within which a trainer's own output must begin: launchers and NCCL write much before it."""
LONGEST_LINE = 1 << 24
"""Most bytes of a line. A few kB of an archive can be a line of gigabytes."""

_Found = TypeVar("_Found")

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without its end). Raises LogError if the file cannot be read.

    A gzipped file that was cut off, as of a killed job, ends where it was cut.
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


def read_until_cut(path: Path, found: Iterator[_Found]) -> Iterator[_Found]:
    """Yield what a reader finds in a file; of a gzipped file that was cut off, what stands before the cut. Raises
    LogError if the file cannot be read."""
    try:
        yield from found
    except EOFError:
        return
    except (OSError, zlib.error) as error:
        raise LogError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def plain(line: str) -> str:
    """Return a line of a terminal without its colours."""
    return _COLOURS.sub("", line) if "\x1b" in line else line


def head(path: Path) -> bytes:
    """Return the first `HEAD_BYTES` of the content, or a little more. Raises LogError if the file cannot be read.

    Of a gzipped file that was cut off, the content ends where it was cut.
    """
    content = b""
    try:
        with open_log(path) as file:
            while len(content) < HEAD_BYTES and (more := file.read1(HEAD_BYTES)):
                content += more  # each read ends with a member of a gzipped file, which may be a line only
    except (OSError, EOFError, zlib.error) as error:
        if not content:
            raise LogError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise LogError(f"{path}: is UTF-16, as PowerShell writes it: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    return content


def open_log(path: Path) -> BufferedReader | gzip.GzipFile:
    """Open a log, and unpack it if it is gzipped, whatever its name. Raises OSError."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if gzipped else path.open("rb")


def matches(path: Path, pattern: re.Pattern[str]) -> bool:
    """Whether a pattern is found in the first `HEAD_LINES` lines."""
    return any(pattern.search(line) for _, line in islice(lines(path), HEAD_LINES))


def seconds(text: str) -> float | None:
    """Return an ISO 8601 time as Unix seconds (local time if it names no zone); None if it is not one."""
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        return None
