"""A run that a real daemon judges as reinforcement learning: where that is shown, and how its jumps are judged."""

from __future__ import annotations

import json

import pytest

from sentinel import wire
from sentinel.node import paths
from sentinel.report.content import report
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import HEALTHY, sentinel
from tests.daemon.test_stages import TERMS, steps

pytestmark = pytest.mark.processes

JUDGED = "reinforcement learning, by reward, approx_kl"
JUMP = [8.0, 8.5, 9.0, 9.5]


def hello(rank: SimulatedRank, **facts: object) -> None:
    rank.say(
        wire.Hello(
            version="test", identity=rank.identity, rollback=TERMS, facts=dict(facts), signals={"reward": "rank"}
        )
    )
    rank.expect(wire.Welcome)


@pytest.mark.parametrize(("norm", "severity"), [(2.0, "warning"), (500.0, "critical")])
def test_a_jump_is_a_warning_and_rolls_back_with_the_gradient_alone(norm: float, severity: str) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        hello(rank)
        steps(rank, 0, HEALTHY[:50])
        hello(rank, judged_as=JUDGED)  # sent again once its columns have appeared
        for start in range(50, 200, 50):
            rank.steps(
                start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50, reinforcement_learning=[1.0] * 50,
                grad_norm=[1.0] * 50, reward=[float(start)] * 50,
            )  # fmt: skip
            rank.say(wire.SnapshotTaken(seq=start + 49, nbytes=1, seconds=0.1, time=0.0))
        rank.steps(200, JUMP, step_seconds=[0.1] * 4, grad_norm=[norm] * 4)
        assert "first 64 steps" in rank.expect(wire.Notice).text
        assert "LossSpike" in rank.expect(wire.Notice).text
        case = next(case for case in json.loads(sentinel("incidents", "--json").stdout) if case["alert"] == "LossSpike")
        assert case["severity"] == severity
        rank.say(wire.Query(what="nothing"))
        rank.expect(wire.Answer)
        assert any(isinstance(message, wire.Prepare) for message in rank.arrived) is (severity == "critical")
        (run,) = json.loads(sentinel("status", "--json").stdout)
        assert run["judged_as"] == JUDGED
        assert f"judged    as {JUDGED}" in sentinel("status").stdout
    with History(paths.histories()[0]) as history:
        assert [event.detail["judged_as"] for event in history.events("judged")] == [JUDGED]
        found = report(history)
    assert "reward" in [panel.title for panel in found.panels]
    assert found.facts["judged_as"] == JUDGED
