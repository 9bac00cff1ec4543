"""The main job as a whole: a real training process, the daemon that it starts, a real fault, alert and rollback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel.node import paths
from sentinel.store import History

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent / "programs" / "spiking.py"


def trained(*arguments: str, **environment: str) -> tuple[list[dict[str, Any]], str]:
    """Run the program; return its lines of stdout, decoded, and its stderr."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def daemon_gone() -> None:
    """Wait until the daemon has removed its directory, which it does last."""
    deadline = time.monotonic() + 60
    while list(paths.runtime_root().iterdir()):
        assert time.monotonic() < deadline, "the daemon does not end with its run"
        time.sleep(0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fault", "alert"), [("spike", "LossSpike"), ("nan", "NonFiniteLoss")])
def test_a_fault_is_told_and_undone(fault: str, alert: str) -> None:
    lines, told = trained(*(["--nan"] if fault == "nan" else []))
    end = lines.pop()
    assert f"CRITICAL  {alert}  spiking" in told
    assert "rolled back to step" in told
    assert end["rollbacks"]
    assert end["finite"]
    before = lines[395]["loss"]
    assert lines[-1]["loss"] < 2 * before + 0.5
    daemon_gone()
    (kept,) = paths.histories()
    with History(kept) as history:
        first = history.incidents()[0]
        assert (first["alert"], first["state"]) == (alert, "rolled_back")
        assert 398 <= first["first_step"] <= 402
        assert len(history.series("loss").values) == len(lines)
        (rollback, *_) = history.events("rollback")
        assert rollback.detail["to"] < 400 < rollback.detail["at"]


@pytest.mark.slow
def test_without_sentinel_the_same_run_stays_wrecked() -> None:
    lines, told = trained("--nan", SENTINEL_DISABLED="1")
    assert told == ""
    assert not lines.pop()["finite"]
