"""Ask a daemon on this node, over its socket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from sentinel import wire
from sentinel.errors import ConfigError, ProtocolError


def ask_daemon(socket_path: Path, what: str, arguments: dict[str, Any] | None = None, *, timeout: float = 5.0) -> Any:
    """Return the answer of one daemon. Raises ConfigError where no daemon is there, ProtocolError where one of another
    version answers, or none within `timeout` seconds."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(str(socket_path))
            connection.sendall(wire.frame(wire.Query(what=what, arguments=arguments or {})))
            answer = _first(connection)
    except TimeoutError:
        words = f"the daemon there has not answered within {timeout:g} s: it is stopped, or very busy"
        raise ProtocolError(f"{socket_path}: {words}") from None
    except OSError as error:
        raise ConfigError(f"{socket_path}: no daemon answers there ({error})") from None
    if isinstance(answer, wire.Refused):
        raise ProtocolError(f"{socket_path}: {answer.reason}")
    if not isinstance(answer, wire.Answer) or not answer.ok:
        raise ConfigError(f"{socket_path}: {answer.reason if isinstance(answer, wire.Answer) else 'no answer'}")
    return answer.content


def _first(connection: socket.socket) -> wire.ToRank:
    frames = wire.Frames()
    while chunk := connection.recv(65536):
        for body in frames.feed(chunk):
            return wire.to_rank(body)
    raise ConnectionResetError("it closed the connection")
