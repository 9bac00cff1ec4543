"""A run that is recorded and not watched: `SENTINEL_RECORD=FILE` takes the place of the daemon.

The file holds the very frames that a daemon would get. They are appended whole, so that a run that is killed
leaves at most the last one cut off, which a reader skips. `sentinel replay FILE` judges it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.transport.connection import Connection, QueuedFrame

LIMIT = 1 << 30
"""Bytes in one file: some million steps of a model of a hundred layers."""
NAMES = 1000
"""Files of one name: an older record is never written over."""


class Recorder(Connection):
    """Stands where the connection to a daemon would. Raises ConfigError where the file cannot be written."""

    def _open_socket(self, path: Path) -> socket.socket:
        self.keeps = False
        self._size = 0
        self.path, self._file = _new_file(path)
        # The sender waits on a socket. On this one nothing will ever come.
        ours, self._other = socket.socketpair()
        return ours

    def flush(self) -> None:
        """Append what is in line, up to the limit. Raises ConfigError at it, and where the disk is full."""
        data = b"".join(frame.data for frame in self._out)
        if not data:
            return
        if self._size + len(data) > LIMIT:
            self._out.clear()
            raise ConfigError(f"the record {self.path} has reached {LIMIT >> 20} MiB, and ends here")
        self._size += len(data)
        self._out.clear()
        self.backlog = 0
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise ConfigError(f"the record {self.path} cannot be written on: {error.strerror}") from None

    def receive(self) -> Iterator[wire.ToRank]:
        """Nothing."""
        return iter(())

    def close(self) -> list[QueuedFrame]:
        """Close the file; nothing will be sent later."""
        self._other.close()
        super().close()
        os.close(self._file)
        return []


def name_file(template: str, identity: wire.Identity) -> Path:
    """The file of a rank: `{rank}` in the name is its number, else it is put behind, where there are several."""
    if "{rank}" in template:
        return Path(template.replace("{rank}", str(identity.rank)))
    return Path(f"{template}.{identity.rank}" if identity.world_size > 1 else template)


def _new_file(path: Path) -> tuple[Path, int]:
    for number in range(1, NAMES):
        chosen = path.with_name(f"{path.name}-{number}") if number > 1 else path
        try:
            return chosen, os.open(chosen, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"SENTINEL_RECORD={path}: cannot be written ({error.strerror})") from None
    raise ConfigError(f"SENTINEL_RECORD={path}: there are {NAMES - 1} records of that name; remove some")
