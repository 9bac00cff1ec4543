"""Ranks that never come: those of a job's other nodes, or all but the rank that attached. What there is gets judged."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest

from sentinel import wire
from sentinel.node import paths
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process, ended

pytestmark = pytest.mark.processes

KILLED = """
import math, os, signal, sys
from pathlib import Path
from tests.daemon.simulated import SimulatedRank
rank = SimulatedRank(Path(sys.argv[1]), 0, 2)
rank.hello()
rank.steps(0, [1.0, math.nan])
rank.ask("status")
os.kill(os.getpid(), signal.SIGKILL)
"""


def list_alerts() -> list[str]:
    with History(paths.state_directory() / "runs" / "r1.sqlite") as history:
        return [case["alert"] for case in history.incidents()]


@pytest.mark.parametrize("on_a_node", [0, 1])
def test_a_run_that_ends_at_once_is_judged(on_a_node: int) -> None:
    """Its steps waited for the other ranks, and went with the daemon: no alert, and no step in the history."""
    with daemon_process() as (path, process), SimulatedRank(path, 0, 2, on_a_node=on_a_node) as rank:
        identity = msgspec.structs.replace(rank.identity, local_world_size=on_a_node)
        rank.say(wire.Hello(version="test", identity=identity, takes_closing=True))
        rank.steps(0, [1.0, math.nan])
        rank.say(wire.Goodbye(next_seq=2, reason="exception"))
        summary = rank.expect(wire.Closing).summary
        assert ended(process) == 0
    assert list_alerts() == ["NonFiniteLoss"]
    assert summary is not None
    assert summary.text.startswith("1 critical (NonFiniteLoss at step 1)")


def test_what_a_killed_rank_reported_is_judged() -> None:
    with daemon_process() as (path, process):
        assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9
        assert ended(process) == 0
    assert set(list_alerts()) == {"NonFiniteLoss", "RankLost"}
