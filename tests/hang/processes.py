"""Shared by the tests of hangs: a rule that fires after 3 s instead of a minute, and queries to a run's daemon."""

from __future__ import annotations

from typing import Any

from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.node.question import ask_daemon

WAIT_SECONDS = 60.0
SOON = """
group: mine
rules:
  - {alert: Hang, scope: rank, expr: stalled_seconds > 3, severity: critical, actions: [evidence, stacks]}
  # Steps of half a millisecond, on a machine that others use:
  - {override: SlowStep, disable: true}
  - {override: Straggler, disable: true}
  - {override: InputBound, disable: true}
  - {override: CommunicationBound, disable: true}
  - {override: MemoryCreep, disable: true}  # and the resident set of a toy still grows in its first 1,500 steps
"""


def ask(run_id: str, what: str) -> Any:
    """Ask the daemon of a run; return its answer, or an empty one if there is no daemon."""
    try:
        return ask_daemon(paths.socket_path(paths.run_directory(run_id)), what)
    except ConfigError:
        return {"runs": []} if what == "status" else []
