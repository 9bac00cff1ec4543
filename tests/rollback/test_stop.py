"""Real jobs that a rule stops: a single process, ranks of torchrun, and under `sentinel run`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.node import paths
from sentinel.store import History
from tests.programs import stopping
from tests.zygote import DAEMON, RANKS, TORCHRUN, run_fork

PROGRAM = Path(stopping.__file__)
JOB_SECONDS = 200
"""Time limit of a job, in seconds: its processes load torch on two busy cores."""
RUN = [sys.executable, "-m", "sentinel", "run", "--restarts", "3", "--pause", "0.1", "--"]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(JOB_SECONDS + 60)]


class Stopped:
    """Runs a job to its end, and holds what it left."""

    def __init__(self, folder: Path, *words: str, ranks: int = 0, run: bool = False, restarts: int = 0) -> None:
        rules = folder / "rules.yaml"
        rules.write_text(stopping.RULES)
        launch = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        command = [*(RUN if run else []), *(launch if ranks else [sys.executable]), str(PROGRAM), str(folder), *words]
        environment = {**os.environ, "SENTINEL_RULES": str(rules), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        done = run_fork(command, DAEMON if run else RANKS, env=environment, timeout=JOB_SECONDS)
        self.status, self.stderr = done.returncode, done.stderr
        self.said = " ".join(done.stderr.split())
        self.ranks = [self._load(folder, 0, rank) for rank in range(max(ranks, 1))]
        """What each rank of the first start wrote; empty if it wrote nothing."""
        self.starts = len(list(folder.glob("*.0.json")))
        assert "internal fault" not in self.stderr

    def _load(self, folder: Path, start: int, rank: int) -> dict[str, Any]:
        path = folder / f"{start}.{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def kept_cases() -> list[dict[str, Any]]:
    (path,) = paths.histories()
    with History(path) as history:
        return history.incidents()


def test_a_process_leaves_and_is_not_started_again(private_places: Path) -> None:
    done = Stopped(private_places, "save", run=True)
    assert done.status == 87, done.stderr
    (rank,) = done.ranks
    assert rank["status"] == 87
    assert rank["step"] == stopping.OFFSET + rank["steps"] - 1 >= stopping.OFFSET + stopping.BAD_AT
    assert done.starts == 1
    assert f"not started again: stopped at step {rank['step']}, by Bad: bad at step 140 (exit code 87)" in done.said
    (case,) = kept_cases()
    assert case["done"] == [f"stopped: all ranks ended training at the exit of step {rank['step']}"]


def test_a_function_that_hangs_is_given_its_time_and_no_more(private_places: Path) -> None:
    done = Stopped(private_places, "hang", run=True)
    assert done.status == 87, done.stderr
    assert "on_stop took over 1 s on rank 0: the process is ended" in done.said
    assert "not started again: stopped at step" in done.said


def test_ranks_of_torchrun_leave_at_one_step_and_its_footer_has_the_code(private_places: Path) -> None:
    done = Stopped(private_places, "save", ranks=2)
    assert done.status == 1, "torchrun's own"
    assert "exitcode : 87" in done.said
    first, second = done.ranks
    assert first == second, done.stderr
    assert (first["sum"], first["status"]) == (3, 87), "the function ran on both, and its collective came to an end"
    assert first["step"] == stopping.OFFSET + first["steps"] - 1
    (case,) = kept_cases()
    assert case["done"] == [f"stopped: all ranks ended training at the exit of step {first['step']}"]


@pytest.mark.parametrize("hook", ["raise", "hang", "die"])
def test_whatever_becomes_of_a_function_the_job_is_stopped_and_not_started_again(
    hook: str, private_places: Path
) -> None:
    """It raises on one rank, hangs on all, or the process is killed in it, as when it is out of memory."""
    done = Stopped(private_places, hook, ranks=2, run=True)
    assert done.status == 87, done.stderr
    assert done.starts <= 1
    assert "not started again: stopped at step" in done.said
    if hook == "raise":
        first, second = done.ranks
        assert first["steps"] == second["steps"]
        assert [rank["status"] for rank in done.ranks] == [87, 87]
        assert "ZeroDivisionError: of the user's" in done.said
    if hook == "hang":
        assert "on_stop took over 1 s on rank 0" in done.said


def test_alerts_that_the_script_names_stop_it_too_and_a_wrong_name_is_reported(private_places: Path) -> None:
    done = Stopped(private_places, "none", "stop_on", ranks=2)
    assert "exitcode : 87" in done.said, done.stderr
    assert len({rank["steps"] for rank in done.ranks}) == 1
    assert "attach(stop_on=...): there is no alert 'Tolt'; did you mean 'Told'?" in done.said


def test_a_rollback_that_is_possible_comes_first(private_places: Path) -> None:
    """The program reports the fault again after each rollback, until the budget is spent."""
    done = Stopped(private_places, "save", "rollback", run=True)
    assert done.status == 87, done.stderr
    cases = kept_cases()
    assert {case["state"] for case in cases[:-1]} == {"rolled_back"}
    assert "which is the budget" in cases[-1]["done"][0]
    assert "stopped: all ranks ended training" in cases[-1]["done"][-1]


def test_torchruns_own_restarts_start_it_again(private_places: Path) -> None:
    """For torchrun an exit code is a failure like any other, as docs/stop.md says."""
    done = Stopped(private_places, "save", ranks=2, restarts=1)
    assert (done.status, done.starts) == (0, 2), done.stderr
    assert {rank["status"] for rank in done.ranks} == {87}
