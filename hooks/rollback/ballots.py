"""What ranks write once and all can read: where their agreement to roll back is kept.

On one node it is a directory. Each word is a symbolic link that points nowhere. Making one is atomic, fails where there
is one, and carries the text with it; neither making nor reading it takes a descriptor. It outlives whoever wrote it.

Over several nodes it is the process group's store, by a connection of our own: torch's is the user's, and busy while
somebody waits in it. It ends with its host. A rank that said that it is ready and then loses the store cannot know what
the others do: that is `InDoubt`, and it must not train on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from sentinel.errors import ConfigError
from sentinel.hooks.core.identity import group_store
from sentinel.hooks.core.worker import start_thread
from sentinel.node import locks, paths

_MOST_CHARACTERS = 200
CONNECT_SECONDS = 5.0
STORE_SECONDS = 20.0
"""How long an answer of the store is waited for: where packets are dropped, torch waits for minutes."""


class InDoubt(Exception):
    """Whether the other ranks restore cannot be found out."""


class Ballot(Protocol):
    """Words by name. What is written stays."""

    poll_seconds: float
    """Between two looks, as long as the others are about to come."""

    def write(self, name: str, text: str) -> str:
        """Write it, unless it is there. Returns why it could not be written."""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """The ballots that are there."""

    def close(self) -> None:
        """Let go of it."""


class DirectoryBallot:
    """In the run's runtime directory, which all ranks of a node share."""

    poll_seconds = 0.001

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError or OSError where it cannot be had."""
        paths.private_directory(directory)
        # As long as a rank holds it, no daemon takes the directory for a leftover.
        self._directory, self._lock = directory, locks.hold(directory, locks.RUN, shared=True)
        if self._lock is None:
            raise ConfigError(f"{directory} is being cleared")

    def write(self, name: str, text: str) -> str:
        try:
            os.symlink(text[:_MOST_CHARACTERS], self._path(name))
        except FileExistsError:
            pass
        except OSError as error:
            return error.strerror or repr(error)
        return ""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        return {name: word for name in names if (word := self._read(name))}

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _read(self, name: str) -> str:
        try:
            return os.readlink(self._path(name))
        except OSError:
            return ""

    def _path(self, name: str) -> Path:
        return self._directory / f"{locks.AGREEMENT}{name}"


class StoreBallot:
    """In the store of the process group, which ranks of all nodes reach."""

    poll_seconds = 0.02

    def __init__(self) -> None:
        """Raises ConfigError where there is none that can be reached."""
        import torch.distributed

        dist: Any = torch.distributed
        store = group_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            raise ConfigError(f"the process group's store is a {type(store).__name__}, and must be a TCPStore")
        host, port = store.host, store.port
        try:
            self._store = _ask_store(
                lambda: dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_SECONDS)
                )
            )
        except InDoubt as error:
            raise ConfigError(f"{error}, at {host}:{port}") from None

    def write(self, name: str, text: str) -> str:
        """As of every ballot. Raises InDoubt where others may read it all the same."""
        _ask_store(lambda: self._store.compare_set(_key(name), "", text[:_MOST_CHARACTERS]))
        return ""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """As of every ballot. Raises InDoubt."""

        def read() -> dict[str, str]:
            keys = [_key(name) for name in names]
            if not self._store.check(keys):  # of all of them
                keys = [key for key in keys if self._store.check([key])]
            words = self._store.multi_get(keys) if keys else []
            return {key.removeprefix(_PREFIX): word.decode() for key, word in zip(keys, words, strict=True)}

        found: dict[str, str] = _ask_store(read)
        return found

    def close(self) -> None:
        del self._store


_PREFIX = "sentinel/rollback/"


def _key(name: str) -> str:
    return _PREFIX + name


def _ask_store(ask: Callable[[], Any]) -> Any:
    """What the store says, within `STORE_SECONDS`. Raises InDoubt."""
    answers: list[Any] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, name="sentinel-store", daemon=True)
    try:
        start_thread(thread)
        thread.join(STORE_SECONDS)
    except (RuntimeError, MemoryError) as fault:
        faults.append(fault)
    if answers:
        return answers[0]
    why = str(faults[0]).partition("\n")[0] if faults else f"no answer in {STORE_SECONDS:g} s"
    raise InDoubt(f"the process group's store is lost ({why[:_MOST_CHARACTERS]})")
