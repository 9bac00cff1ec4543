"""Ask live daemons, for the commands that show their state."""

from __future__ import annotations

import os
from typing import Any

from sentinel.cli.plain import echo
from sentinel.errors import ConfigError, ProtocolError
from sentinel.node import paths
from sentinel.node.question import ask_daemon

_reported: set[str] = set()


def ask_daemons(what: str, arguments: dict[str, Any] | None = None) -> list[Any]:
    """Return the answers of all live daemons. The socket of a killed daemon is skipped, but reported on stderr if the
    environment names it. A daemon of another version, or without an answer, is reported too."""
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
    """Report a text once only, because `top` asks again and again."""
    if text not in _reported:
        _reported.add(text)
        echo(f"sentinel: {text}", err=True)


def list_runs() -> list[dict[str, Any]]:
    """Return the runs that are watched now, as `sentinel status --json` prints them."""
    return [run for answer in ask_daemons("status") for run in answer["runs"]]
