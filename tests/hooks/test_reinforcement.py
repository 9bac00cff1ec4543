"""Whether a run is judged as reinforcement learning: by what the script logs, or by the user's argument."""

from __future__ import annotations

from typing import Any

import pytest

import sentinel
from sentinel import wire
from sentinel.errors import AttachError
from sentinel.hooks.session.monitor import LIMIT, TrainerNumbers
from tests.hooks import loops
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import fit, sgd


def logged(daemon: FakeDaemon, numbers: dict[str, float], **options: Any) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer, **options) as monitor:
        fit(net, optimizer, 1)
        monitor.log(**numbers)
        fit(net, optimizer, 2)
    daemon.ended()


SIGNS = {"reward": 1.0, "train/approx_kl": 0.01}
DPO = {"rewards/chosen": 1.0, "rewards/rejected": 0.5, "rewards/margins": 0.5, "logps/chosen": -20.0, "entropy": 1.0}


def test_the_columns_that_decide_are_reported_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    logged(daemon, SIGNS, run="r")
    assert daemon.series("reinforcement_learning") == {2: 1.0}, "from the step after it was seen"
    assert daemon.series("reward") == {1: 1.0}
    assert "judged_as" not in daemon.of(wire.Hello)[0].facts
    assert daemon.of(wire.Hello)[-1].facts["judged_as"] == "reinforcement learning, by reward, train/approx_kl"
    said = capsys.readouterr().err
    assert said.count("run 'r' is judged as reinforcement learning, by reward, train/approx_kl: ") == 1


@pytest.mark.parametrize("numbers", [DPO, {"reward": 1.0}, {}])
def test_other_runs_are_not_judged_as_reinforcement_learning(
    numbers: dict[str, float], daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    logged(daemon, numbers)
    assert not daemon.series("reinforcement_learning")
    assert "judged" not in capsys.readouterr().err


def test_the_users_argument_decides(daemon: FakeDaemon) -> None:
    logged(daemon, SIGNS, kind="supervised")
    assert not daemon.series("reinforcement_learning")
    daemon.messages.clear()
    logged(daemon, {}, kind="rl")
    assert set(daemon.series("reinforcement_learning").values()) == {1.0}
    assert 'by attach(kind="rl")' in daemon.of(wire.Hello)[0].facts["judged_as"]
    net = loops.model()
    with pytest.raises(AttachError, match=r"kind='RL'.*'rl' or 'supervised'"):
        sentinel.attach(net, sgd(net), kind="RL")


def test_a_trainers_numbers_are_finite_named_and_bounded(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer) as monitor:
        numbers = TrainerNumbers()
        numbers.log(
            monitor,
            {
                "rewards/format/mean": 0.5,
                "loss": 1e9,
                "lr": 7,
                "eval_x": float("nan"),
                "note": "text",
                "rollout/ep_rew_mean": 2,
            },
        )
        fit(net, optimizer, 1)
        numbers.log(monitor, {f"key {number}": number for number in range(LIMIT + 10)})
        fit(net, optimizer, 1)
    daemon.ended()
    signals = set(daemon.of(wire.Hello)[-1].signals)
    assert {"rewards_format_mean", "reward", "key_0"} <= signals
    assert len(signals) <= LIMIT
    assert daemon.series("rewards_format_mean") == {0: 0.5}
    assert daemon.series("loss")[0] < 1e6, "what is measured stays as measured"
    assert "eval_x" not in signals
    assert capsys.readouterr().err.count(f"the trainer logs more than {LIMIT} numbers") == 1
