"""Decides which silences apply to a run.

A daemon of one user reads that user's file. A node's service cannot: only the user's environment says where the file
is, and root must not open a path that a user names. Root's own file may be out of its reach, too, as under systemd. So
`sentinel silence` sends its silences to the service, which knows from the kernel who asks, and keeps one file per user;
the silences of root apply to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sentinel import wire
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.notify import silences
from sentinel.notify.silences import Silence, Silences


class Silencing:
    """The silences that a daemon knows."""

    def __init__(self, tenants: Tenants, *, service: bool) -> None:
        self._tenants, self._service = tenants, service
        self._all = Silences(paths.service_place() / "0" / silences.FILE if service else _own())
        self._by_user: dict[int, Silences] = {}

    def find_silences(self, run_id: str) -> Silences:
        """Return the silences that apply to a run."""
        owner = self._tenants.owner(run_id)
        if not owner:
            return self._all
        if owner not in self._by_user:
            try:
                self._by_user[owner] = Silences(_file(owner), beside=self._all)
            except ConfigError:  # the history, which has no place either, reports it
                return self._all
        self._by_user[owner].refresh()
        return self._by_user[owner]

    def answer(self, uid: int, arguments: Mapping[str, Any]) -> wire.Answer:
        """Answer a user of a service: `{"add": silence}`, `{"end": id}`, or nothing. The answer lists the silences."""
        if not self._service:
            return wire.Answer(ok=True, content=[])  # the command wrote the file that this daemon reads
        try:
            return wire.Answer(ok=True, content=msgspec.to_builtins(_apply_command(_file(uid), arguments)))
        except (ConfigError, msgspec.ValidationError) as error:
            return wire.Answer(ok=False, reason=str(error))


def _apply_command(path: Path, arguments: Mapping[str, Any]) -> list[Silence]:
    if "add" in arguments:
        silences.put(path, msgspec.convert(arguments["add"], Silence))
    elif "end" in arguments:
        silences.end(path, str(arguments["end"]))
    return silences.read(path)


def _file(uid: int) -> Path:
    folder = paths.service_state() / str(uid)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: silences cannot be kept there ({error.strerror})") from None
    return folder / silences.FILE


def _own() -> Path | None:
    try:
        return silences.file()
    except ConfigError:
        return None  # the history, which has no place either, reports it
