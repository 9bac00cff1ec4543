"""Talks to live daemons for the commands that show their state."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from sentinel import wire
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError, ProtocolError
from sentinel.node import paths

TIMEOUT_SECONDS = 5.0
_said: set[str] = set()


def ask_daemon(socket_path: Path, what: str, arguments: dict[str, Any] | None = None) -> Any:
    """Answer of one daemon. Raises ConfigError where none answers there, ProtocolError where another version does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            connection.connect(str(socket_path))
            connection.sendall(wire.frame(wire.Query(what=what, arguments=arguments or {})))
            answer = _first(connection)
    except OSError as error:
        raise ConfigError(f"{socket_path}: no daemon answers there ({error})") from None
    if isinstance(answer, wire.Refused):
        raise ProtocolError(f"{socket_path}: {answer.reason}")
    if not isinstance(answer, wire.Answer) or not answer.ok:
        raise ConfigError(f"{socket_path}: {answer.reason if isinstance(answer, wire.Answer) else 'no answer'}")
    return answer.content


def all_asked(what: str, arguments: dict[str, Any] | None = None) -> list[Any]:
    """Answers of all daemons that are alive. A socket that a killed daemon left behind is passed over; one that the
    environment names, and a daemon of another version, are said."""
    answers, named = [], os.environ.get("SENTINEL_ADDRESS", "")
    for path in paths.live_sockets():
        try:
            answers.append(ask_daemon(path, what, arguments))
        except ConfigError as error:
            if named == f"unix:{path}":
                _say(f"SENTINEL_ADDRESS: {error}")
        except ProtocolError as error:
            _say(str(error))
    return answers


def _say(text: str) -> None:
    """Once: one who looks again and again is told nothing new."""
    if text not in _said:
        _said.add(text)
        echo(f"sentinel: {text}", err=True)


def _first(connection: socket.socket) -> wire.ToRank:
    frames = wire.Frames()
    while chunk := connection.recv(65536):
        for body in frames.feed(chunk):
            return wire.to_rank(body)
    raise ConnectionResetError("it closed the connection")


def live_runs() -> set[str]:
    """Ids of the runs that a daemon watches now."""
    return {str(answer["run_id"]) for status in all_asked("status") for answer in status["runs"]}
