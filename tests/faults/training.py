"""Runs a program of `tests/programs` with the daemon that it starts, and reads the cases of its run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from sentinel.node import paths
from sentinel.store import History
from tests.zygote import TRAINING, run_fork

PROGRAMS = Path(__file__).parents[1] / "programs"


def trained(program: str, *arguments: str, status: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Run a program; return the cases of its run, and what the program printed."""
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    done = run_fork(command, TRAINING, timeout=100, cwd="/")
    assert done.returncode == status, done.stderr
    deadline = time.monotonic() + 60
    while list(paths.runtime_root().iterdir()):  # the daemon removes its directory last
        assert time.monotonic() < deadline, "the daemon does not end with its run"
        time.sleep(0.05)
    (kept,) = paths.histories()
    with History(kept) as history:
        return history.incidents(), done.stdout
