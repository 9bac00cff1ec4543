"""A real run whose task changes: if the stage is announced, there is no alert and no rollback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sentinel.node import paths
from sentinel.store import History
from tests.zygote import TRAINING, run_fork

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROGRAM = Path(__file__).parent.parent / "programs" / "curriculum.py"


def run(how: str) -> subprocess.CompletedProcess[str]:
    return run_fork([sys.executable, PROGRAM, how], TRAINING, cwd="/", timeout=200)


def incidents() -> list[str]:
    (path,) = paths.histories()
    with History(path) as history:
        return [case["alert"] for case in history.incidents() if case["severity"] != "info"]


@pytest.mark.usefixtures("private_places")
def test_a_change_of_the_task_that_was_announced_is_no_fault() -> None:
    done = run("stage")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not {"LossSpike", "Divergence", "GradientSpike"} & set(incidents())
    (path,) = paths.histories()
    with History(path) as history:
        ((seq, detail),) = [(event.seq, event.detail) for event in history.events("stage")]
        assert (seq, detail) == (500, {"name": "with sines"})


@pytest.mark.usefixtures("private_places")
def test_the_same_change_is_a_fault_if_it_is_not_announced() -> None:
    run("phase")
    assert {"LossSpike", "Divergence"} & set(incidents())
