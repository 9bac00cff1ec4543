"""What ranks write once and all can read: where their agreement to roll back is kept.

On one node it is a directory. Each word is a symbolic link that points nowhere. Making one is atomic, fails where there
is one, and carries the text with it; neither making nor reading it takes a descriptor. It outlives whoever wrote it.

Over several nodes it is the process group's store, which ends with its host. A rank that said that it is ready and then
loses the store cannot know what the others do: that is `InDoubt`, and it must not train on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sentinel.errors import ConfigError
from sentinel.hooks.core.store_client import StoreClient, StoreLost
from sentinel.node import locks, paths

_MOST_CHARACTERS = 200


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
        try:
            self._client = StoreClient()
        except StoreLost as error:
            raise ConfigError(str(error)) from None

    def write(self, name: str, text: str) -> str:
        """As of every ballot. Raises InDoubt where others may read it all the same."""
        self._ask(lambda store: store.compare_set(_key(name), "", text[:_MOST_CHARACTERS]))
        return ""

    def read_all(self, names: Sequence[str]) -> dict[str, str]:
        """As of every ballot. Raises InDoubt."""

        def read(store: Any) -> dict[str, str]:
            keys = [_key(name) for name in names]
            if not store.check(keys):  # of all of them
                keys = [key for key in keys if store.check([key])]
            words = store.multi_get(keys) if keys else []
            return {key.removeprefix(_PREFIX): word.decode() for key, word in zip(keys, words, strict=True)}

        found: dict[str, str] = self._ask(read)
        return found

    def close(self) -> None:
        del self._client

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return self._client.ask(question)
        except StoreLost as error:
            raise InDoubt(str(error)) from None


_PREFIX = "sentinel/rollback/"


def _key(name: str) -> str:
    return _PREFIX + name
