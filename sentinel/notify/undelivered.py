"""What a daemon could not deliver before it ended.

The same user's next daemon shows it on the training terminal, once, and `sentinel status` shows it until then. A run
that goes on delivers its own messages from its outbox.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.node import small_files
from sentinel.notify.entry import Entry
from sentinel.text import drop_controls, join_names

log = logging.getLogger(__name__)

FILE = "undelivered.jsonl"
LIMIT = 200
"""Most lines of the file: the newest. The histories have all."""


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """One group that one receiver does not have, or whose end it does not have."""

    run: str
    run_id: str
    alert: str
    receiver: str
    why: str


def list_left(run: str, run_id: str, entries: Iterable[Entry]) -> list[Left]:
    """Return the groups of a run that a receiver does not have, or whose end it does not have."""
    return [
        Left(run=run, run_id=run_id, alert=entry.alert, receiver=entry.receiver, why=entry.lost or entry.trouble)
        for entry in entries
        if entry.pending or entry.lost
    ]


def leave(folder: Path, found: Sequence[Left]) -> None:
    """Write it down for the next daemon. Never raises."""
    if not found:
        return
    path = folder / FILE
    try:
        with small_files.lock_changes(path):
            lines = [*read(folder), *found][-LIMIT:]
            small_files.write_whole(path, "".join(msgspec.json.encode(one).decode() + "\n" for one in lines))
    except ConfigError as error:
        log.error("%s", error)


def read(folder: Path) -> list[Left]:
    """Return what is written down. A line that cannot be read is skipped."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Left))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found


def take(folder: Path, run_id: str) -> list[str]:
    """Return in words what other runs than this one left undelivered, and clear the file."""
    if not (found := read(folder)):
        return []
    try:
        with small_files.lock_changes(folder / FILE):
            found = read(folder)  # another daemon may have taken it since, or left more
            (folder / FILE).unlink(missing_ok=True)
    except (ConfigError, OSError) as error:
        log.error("%s", error)
    return describe_left(one for one in found if one.run_id != run_id)


def describe_left(found: Iterable[Left]) -> list[str]:
    """Return a sentence per run."""
    by_run: dict[str, list[Left]] = {}
    for one in found:
        by_run.setdefault(one.run_id, []).append(one)
    return [
        f"not delivered of run {drop_controls(group[0].run)} ({run_id}): "
        + join_names(
            [f"{drop_controls(one.alert)} to {one.receiver}" + (f" ({one.why})" if one.why else "") for one in group], 3
        )
        + "; sentinel incidents shows it"
        for run_id, group in by_run.items()
    ]
