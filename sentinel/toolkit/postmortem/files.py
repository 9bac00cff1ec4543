"""Reads the files that a job left: the kind of each, its rank, and what it says. They may come from anyone.

Pickles are read without importing a name; nothing is unpacked beyond a limit; links are not followed out of a folder.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from sentinel import safe_pickle
from sentinel.errors import ConfigError
from sentinel.toolkit.postmortem.words import Failure, JobLog, Said, read_log
from sentinel.wire.flight_recorder import Flight, flight_of

FILES = 10_000
LARGEST = 256 * 1024**2
"""Most bytes of one file, unpacked."""
_RANK = re.compile(r"(?:rank[_-]?(\d{1,6})|(?:(?<!slurm)(?<!job)[_-]|/)(\d{1,4}))(?:\.\w+)*$")
"""The end of a file's name. More than four digits without the word are the number of a job (Slurm: `%x-%j`)."""
_DATE = re.compile(
    r"[_.-]?(?<!\d)(?:19|20)\d\d[_.-]?[01]\d[_.-]?[0-3]\d"
    r"(?:[T_.-]?\d\d[:._-]?\d\d(?:[:._-]?\d\d)?)?(?!\d)"
)
"""A date in a file's name, maybe with a time."""
_ATTEMPT = re.compile(r"^attempt_(\d{1,6})$")
_FOLDER = re.compile(r"^(?:rank[_-]?)?(\d{1,6})$")


class Remains(msgspec.Struct):
    """All that is known of a job's ranks."""

    flights: dict[int, Flight] = {}
    log: JobLog = msgspec.field(default_factory=JobLog)
    unread: list[str] = []
    """Files that could not be used, and why."""
    lines: int = 0
    """Number of lines of the logs that were read."""

    @property
    def said(self) -> dict[int, Said]:
        """What each rank's lines say."""
        return self.log.said

    @property
    def ranks(self) -> list[int]:
        """The ranks of which anything is known."""
        ended = {one.rank for one in self.log.exits if one.rank is not None}
        return sorted(self.flights.keys() | self.said.keys() | self.log.ranks | ended)


def remains(paths: Iterable[Path]) -> Remains:
    """Read files and folders. Raises ConfigError if there is none, or nothing in them is about a rank."""
    found = Remains()
    for path in _choose_last_attempts(found, list(_files(paths))):
        try:
            _take(found, path)
        except (ConfigError, ValueError) as error:
            found.unread.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    if not found.ranks and not found.log.unplaced and not found.log.exits and not found.log.job:
        told = "".join(f"\n  {why}" for why in found.unread[:5])
        raise ConfigError(
            "nothing of a rank in there: flight-recorder dumps (nccl_trace_rank_N), torchrun's error files, or logs "
            f"whose lines begin with the rank are read{told}"
        )
    return found


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    count = 0
    for path in paths:
        if not os.path.exists(path):
            raise ConfigError(f"{path}: no such file or folder")
        try:
            each = list(islice(path.rglob("*"), FILES + 1)) if path.is_dir() else [path]
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        count += len(each)
        if count > FILES:
            raise ConfigError(f"{path}: more than {FILES} files; name the job's own folder")
        for file in sorted(each):
            if file.is_file() and not (file.is_symlink() and path.is_dir()):
                yield file


def _choose_last_attempts(found: Remains, files: list[Path]) -> list[Path]:
    """Return the files that are not of an earlier attempt of torchrun; the folders of these are noted as not read."""
    attempts = {file: next(filter(None, map(_find_attempt, file.parents)), None) for file in files}
    last: dict[Path, int] = {}
    for folder, number in filter(None, attempts.values()):
        last[folder] = max(number, last.get(folder, 0))
    earlier = {file: one for file, one in attempts.items() if one is not None and one[1] < last[one[0]]}
    for folder, number in sorted(set(earlier.values())):
        found.unread.append(f"{folder}/attempt_{number}: an earlier attempt; to judge it, name this folder alone")
    return [file for file in files if file not in earlier]


def _find_attempt(folder: Path) -> tuple[Path, int] | None:
    """Return the folder of a job of torchrun, and the number of the attempt, if `folder` is one of an attempt."""
    found = _ATTEMPT.match(folder.name)
    return (folder.parent, int(found[1])) if found is not None else None


def _take(found: Remains, path: Path) -> None:
    content = _content(path)
    rank = _rank_of(path)
    if content[:1] == b"\x80":
        _take_flight(found, path, safe_pickle.load_pickle(path, content, "a flight recorder's dump"), rank)
    elif content.lstrip()[:1] == b"{" and (parsed := _json(content)) is not None:
        if "entries" in parsed:
            _take_flight(found, path, parsed, rank)
        else:
            _take_error(found, parsed, rank)
    else:
        lines = content.decode(errors="replace").split("\n")
        found.log.add(read_log(lines, rank), found.lines)
        found.lines += len(lines)


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if len(content) > LARGEST:
        raise ConfigError(f"{path}: over {LARGEST // 1024**2} MiB; cut out the end of it")
    return content


def _json(content: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _rank_of(path: Path) -> int | None:
    """Return the rank in a file's name (`nccl_trace_rank_3`), or its folder's (torchrun: `attempt_0/3/error.json`)."""
    if (named := _RANK.search("/" + _DATE.sub("", path.name))) is not None:
        return int(named[1] or named[2])
    folder = _FOLDER.match(path.parent.name)
    return int(folder[1]) if folder is not None else None


def _take_flight(found: Remains, path: Path, dump: Any, rank: int | None) -> None:
    if rank is None and isinstance(dump, dict) and isinstance(dump.get("rank"), int):
        rank = dump["rank"]
    if rank is None:
        raise ConfigError(f"{path}: which rank it is of is unknown; end its name with the rank")
    if not isinstance(dump, dict):
        raise ConfigError(f"{path}: no flight recorder's dump")
    try:
        found.flights[rank] = flight_of(dump)
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        raise ConfigError(f"{path}: not as a flight recorder writes it ({error})") from None


def _take_error(found: Remains, parsed: dict[str, Any], rank: int | None) -> None:
    """Take the failure in torchrun's error file: `message` is a dict of `message` and `extraInfo`, or a string."""
    message = parsed.get("message")
    words = message.get("message", "") if isinstance(message, dict) else message
    if rank is None or not isinstance(words, str) or not words:
        return
    more = message.get("extraInfo") if isinstance(message, dict) else None
    more = more if isinstance(more, dict) else {}
    stack = read_log(str(more.get("py_callstack", "")).split("\n"), rank).said.get(rank, Said()).failures
    place = stack[-1].place if stack else ""
    time = str(more.get("timestamp", ""))
    failure = Failure(words[:2000], place, time=float(time) if time.isdigit() and len(time) < 12 else 0.0)
    found.said.setdefault(rank, Said()).failures.append(failure)
