"""Silences: for a while an alert is not sent. It is still recorded, and Sentinel still acts on it.

One JSON file in the state directory, replaced as a whole: it can be written while no daemon runs, and outlives all
daemons. Each daemon checks whether it changed. Ended silences are kept for a day.
"""

from __future__ import annotations

import fnmatch
import getpass
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.node import paths, small_files

log = logging.getLogger(__name__)

FILE = "silences.json"
KEPT_SECONDS = 24 * 3600.0
LIMIT = 1000
LONGEST_SECONDS = 366 * 86400.0
LONGEST_TEXT = 1000


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """One silence: which alert of which run is muted, and until when."""

    id: str
    alert: str
    """Name of an alert, or a pattern: `Loss*`, `*`."""
    run: str = ""
    """Name or id of a run; empty: all runs."""
    began: float
    until: float
    """Unix seconds."""
    comment: str = ""
    by: str = ""
    """The user who wrote it."""

    def holds(self, alert: str, run: str, run_id: str, now: float) -> bool:
        """Return whether it mutes this alert of this run now."""
        return now < self.until and self.run in ("", run, run_id) and fnmatch.fnmatchcase(alert, self.alert)


class Silences:
    """The silences of the file, read again when it has changed. Never raises: with no file there is no silence."""

    def __init__(
        self, file: Path | None, clock: Callable[[], float] = time.time, beside: Silences | None = None
    ) -> None:
        """`beside`: further silences that hold too."""
        self._file, self._clock, self._beside = file, clock, beside
        self._stamp: tuple[int, int, int] | None = None
        self._trouble = ""
        self._silences: tuple[Silence, ...] = ()

    def find_silence(self, case: Case) -> str:
        """Return the id of a silence that mutes a case now; empty: none."""
        holding = self.about(case.alert, case.run, case.run_id)
        return holding[0].id if holding else ""

    def about(self, alert: str, run: str, run_id: str) -> list[Silence]:
        """Return the silences that hold for an alert of a run now."""
        now = self._clock()
        return [silence for silence in self._known if silence.holds(alert, run, run_id, now)]

    def of_run(self, run: str, run_id: str) -> list[Silence]:
        """Return the silences that hold now and concern this run or all runs."""
        now = self._clock()
        return [silence for silence in self._known if now < silence.until and silence.run in ("", run, run_id)]

    @property
    def _known(self) -> tuple[Silence, ...]:
        return self._silences + (self._beside._known if self._beside else ())

    def refresh(self) -> None:
        """Read the file again if it has changed; called several times a second."""
        if self._beside is not None:
            self._beside.refresh()
        if self._file is None:
            return
        try:
            status = self._file.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp != self._stamp:
                self._silences = tuple(read(self._file))
                self._stamp = stamp  # only now: a file that cannot be read yet is tried again
            self._trouble = ""
        except FileNotFoundError:
            self._stamp, self._silences, self._trouble = None, (), ""
        except (OSError, ConfigError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("silences stay as they were: %s", error)


def file() -> Path:
    """Return the path of the silences' file. Raises ConfigError where there is no state directory."""
    return paths.state_directory() / FILE


def read(path: Path) -> list[Silence]:
    """Return all silences kept, ended ones too, in order of their end. Raises ConfigError where the file is damaged."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Silence])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it to begin with no silences") from None
    return sorted(found, key=lambda silence: silence.until)


def add(path: Path, *, alert: str, run: str, seconds: float, comment: str) -> Silence:
    """Create a silence and add it to the file. Raises ConfigError."""
    now = time.time()
    silence = Silence(
        id=secrets.token_hex(3), alert=alert, run=run, began=now, until=now + seconds, comment=comment, by=user()
    )
    put(path, silence)
    return silence


def put(path: Path, silence: Silence) -> None:
    """Add a silence to the file. Raises ConfigError where it is too long, or there are too many."""
    if not 0 < silence.until - time.time() <= LONGEST_SECONDS:
        ends = f"a silence ends within {LONGEST_SECONDS / 86400:.0f} days"
        raise ConfigError(f"{ends}, and not at once; give another --for")
    if any(len(text) > LONGEST_TEXT for text in (silence.id, silence.alert, silence.run, silence.comment, silence.by)):
        raise ConfigError(f"a silence's texts have {LONGEST_TEXT} characters at most")
    with small_files.lock_changes(path):
        kept = [other for other in read(path) if time.time() < other.until + KEPT_SECONDS]
        if len(kept) >= LIMIT:
            raise ConfigError(f"{path}: {LIMIT} silences already; end some with `sentinel silence --end ID`")
        _write(path, [*kept, silence])


def end(path: Path, identity: str) -> Silence:
    """End a silence now. Raises ConfigError where none of this id holds."""
    now = time.time()
    with small_files.lock_changes(path):
        kept = read(path)
        for index, silence in enumerate(kept):
            if silence.id == identity and now < silence.until:
                kept[index] = msgspec.structs.replace(silence, until=now)
                _write(path, kept)
                return kept[index]
    raise ConfigError(f"no silence {identity} holds; see `sentinel silence --list`")


def _write(path: Path, silences: list[Silence]) -> None:
    small_files.write_whole(path, msgspec.json.format(msgspec.json.encode(silences), indent=2).decode())


def user() -> str:
    """Return the name of the user who runs this, or the uid where there is none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's uid without a name
        return str(os.getuid())
