"""What a daemon could not deliver is left for the next one, also where several runs end at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sentinel.notify import undelivered

RUNS = [f"r{number}" for number in range(8)]


def leave(folder: Path, run_id: str) -> None:
    undelivered.leave(folder, [undelivered.Left(run="train", run_id=run_id, alert="A", receiver="ops", why="away")])


def test_of_runs_that_close_at_once_nothing_is_lost_and_nothing_is_taken_twice(tmp_path: Path) -> None:
    """Each wrote the file as it had read it, without what another one had added meanwhile."""
    for _ in range(20):
        with ThreadPoolExecutor(2 * len(RUNS)) as pool:
            leaving = [pool.submit(leave, tmp_path, run_id) for run_id in RUNS]
            taking = [pool.submit(undelivered.take, tmp_path, "other") for _ in RUNS]
        assert all(one.exception() is None for one in leaving)
        taken = [line for one in taking for line in one.result()] + undelivered.take(tmp_path, "other")
        assert sorted(line.split("(")[1][:2] for line in taken) == RUNS
