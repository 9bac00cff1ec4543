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
_reported: set[str] = set()


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


def ask_daemons(what: str, arguments: dict[str, Any] | None = None) -> list[Any]:
    """Answers of all daemons that are alive. A socket that a killed daemon left behind is passed over; one that the
    environment names, and a daemon of another version, are reported on stderr."""
    answers, named = [], os.environ.get("SENTINEL_ADDRESS", "")
    for path in paths.live_sockets():
        try:
            answers.append(ask_daemon(path, what, arguments))
        except ConfigError as error:
            if named == f"unix:{path}":
                _report(f"SENTINEL_ADDRESS: {error}")
        except ProtocolError as error:
            _report(str(error))
    return answers


def _report(text: str) -> None:
    """Once: `top` asks again and again."""
    if text not in _reported:
        _reported.add(text)
        echo(f"sentinel: {text}", err=True)


def _first(connection: socket.socket) -> wire.ToRank:
    frames = wire.Frames()
    while chunk := connection.recv(65536):
        for body in frames.feed(chunk):
            return wire.to_rank(body)
    raise ConnectionResetError("it closed the connection")


def list_runs() -> list[dict[str, Any]]:
    """The runs that are watched now, as `sentinel status --json` has them."""
    return [run for answer in ask_daemons("status") for run in answer["runs"]]
