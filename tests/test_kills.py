"""A daemon that is killed again and again, and a run that does not notice: bench/kills.py, short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent.parent / "bench" / "kills.py"


PATIENCE_SECONDS = 60
"""A busy machine may need more than the two seconds of a run's end for the start of a daemon."""


def killed(*arguments: str) -> list[str]:
    """What was noticed, by run."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--patience", str(PATIENCE_SECONDS), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        cwd="/",
    )
    assert done.stdout, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sum(run["kills"] for run in runs) >= 1
    return [finding for run in runs for finding in run["noticed"]]


def test_nobody_notices_that_the_daemon_is_killed() -> None:
    assert killed("--kills", "3") == []


def test_a_kill_at_the_very_end_leaves_nothing_behind() -> None:
    assert killed("--kills", "1", "--last", "--seed", "7") == []
