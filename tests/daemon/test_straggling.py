"""Real jobs of four ranks, one of which is slow; and ranks that lag or are silent, which delay no rule."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel.node import paths
from sentinel.node.question import ask_daemon
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.programs import straggling
from tests.zygote import RANKS, TORCHRUN, run_fork

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_the_rank_that_keeps_the_others_waiting(private_places: Path) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "SENTINEL_RUN_ID": "s"}
    done = run_fork([*torchrun, "-m", straggling.__name__], RANKS, env=environment)
    assert done.returncode == 0, done.stderr
    histories = sorted(paths.histories(), key=lambda path: path.stem)
    assert len(histories) == len(straggling.WAYS)
    for path, way in zip(histories, straggling.WAYS, strict=True):
        with History(path) as history:
            [case] = [case for case in history.incidents() if case["alert"] == "Straggler"]
        straggler = straggling.STRAGGLERS[way]
        part = "its forward pass" if way.endswith("forward") else "waiting for its data"
        assert [member["name"] for member in case["members"]] == [str(straggler)]
        assert straggling.HEALTHY < case["step"] <= straggling.HEALTHY + straggling.SLOW, (
            "silent while all were healthy"
        )
        longer = r"takes (\d+) ms a step longer than the quickest rank"
        words = rf"rank {straggler}, on \S+, {longer}, mostly for {part}, since step \d+"
        found = re.match(words, case["diagnosis"]["cause"])
        assert found, case["diagnosis"]["cause"]
        assert int(found[1]) == pytest.approx(1e3 * straggling.LATE_SECONDS, rel=0.5)


def alerts(path: Path, least: int, seconds: float = 60.0) -> list[dict[str, Any]]:
    """Return the run's incidents, once there are at least `least`."""
    deadline = time.monotonic() + seconds
    while len(found := ask_daemon(path, "incidents")) < least:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return list(found)


@pytest.mark.slow
@pytest.mark.parametrize("behind", ["silent", "lags"])
def test_a_rank_that_says_nothing_or_lags_holds_up_no_rule_of_the_others(behind: str) -> None:
    """Rank 1 says hello and then nothing, or stays 40 steps behind."""
    nan = float("nan")
    with contextlib.ExitStack() as stack:
        path, _ = stack.enter_context(daemon_process())
        zero, one, two = (stack.enter_context(SimulatedRank(path, rank, 3)) for rank in range(3))
        for rank in (zero, one, two):
            rank.hello()
        for rank in (zero, two):
            rank.steps(0, [2.0] * 60)
        if behind == "lags":
            one.steps(0, [2.0] * 20)
        zero.steps(60, [2.0, nan])
        two.steps(60, [2.0, 2.0])
        case = alerts(path, 1)[0]
        assert (case["alert"], case["step"]) == ("NonFiniteLoss", 61)
        if behind == "lags":  # its steps arrive then, and are no news of a step that was judged
            one.steps(20, [2.0] * 42)
            for rank in (zero, one, two):
                rank.steps(62, [2.0])
            assert len(alerts(path, 1)) == 1
