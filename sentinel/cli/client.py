"""Talks to live daemons for the commands that show their state."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from sentinel import places, wire
from sentinel.errors import ConfigError, ProtocolError

TIMEOUT_SECONDS = 5.0


def asked(socket_path: Path, what: str) -> Any:
    """Answer of one daemon. Raises ConfigError where none answers there."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            connection.connect(str(socket_path))
            connection.sendall(wire.frame(wire.Query(what=what)))
            answer = _first(connection)
    except (OSError, ProtocolError) as error:
        raise ConfigError(f"{socket_path}: no daemon answers there ({error})") from None
    if isinstance(answer, wire.Refused):
        raise ConfigError(f"{socket_path}: {answer.reason}")
    if not isinstance(answer, wire.Answer) or not answer.ok:
        raise ConfigError(f"{socket_path}: {answer.reason if isinstance(answer, wire.Answer) else 'no answer'}")
    return answer.content


def all_asked(what: str) -> list[Any]:
    """Answers of all daemons that are alive; a socket that a killed daemon left behind is passed over."""
    answers = []
    for path in places.live_sockets():
        try:
            answers.append(asked(path, what))
        except ConfigError:
            continue
    return answers


def _first(connection: socket.socket) -> wire.ToRank:
    frames = wire.Frames()
    while chunk := connection.recv(65536):
        for body in frames.feed(chunk):
            return wire.to_rank(body)
    raise ProtocolError("it closed the connection")
