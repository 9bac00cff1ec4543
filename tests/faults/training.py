"""Runs a program of `tests/programs` with the daemon that it starts, and reads what was told of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sentinel.node import paths
from sentinel.store import History

PROGRAMS = Path(__file__).parents[1] / "programs"


def trained(program: str, *arguments: str, ranks: int = 1, status: int = 0) -> tuple[list[dict[str, Any]], str]:
    """The cases of a run, and what the program printed. Several ranks are torchrun's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=dict(os.environ), cwd="/")
    assert done.returncode == status, done.stderr
    deadline = time.monotonic() + 60
    while list(paths.runtime_root().iterdir()):  # the daemon takes its directory away last
        assert time.monotonic() < deadline, "the daemon does not end with its run"
        time.sleep(0.05)
    (kept,) = paths.histories()
    with History(kept) as history:
        return history.incidents(), done.stdout
