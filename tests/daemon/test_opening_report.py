"""After the opening examination one line gives its result, on the terminal and in `sentinel status`."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from sentinel import wire
from sentinel.engine import load_rules
from sentinel.errors import RuleError
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import sentinel
from tests.daemon.test_restart import kept as kept_in_history
from tests.daemon.test_restart import kill

pytestmark = pytest.mark.processes


def steps(
    rank: SimulatedRank,
    first: int,
    count: int,
    *,
    kept: dict[int, float],
    rate: float = 1e-3,
    pace: wire.Pace | None = None,
) -> None:
    """Report steps with a learning rate; the steps in `kept` also say whether gradients were kept."""
    rank.say(
        wire.Batch(
            seqs=array("q", range(first, first + count)).tobytes(),
            times=array("d", [1e9 + seq for seq in range(first, first + count)]).tobytes(),
            columns={
                "loss": wire.Column(array("d", [1.0] * count).tobytes()),
                "learning_rate": wire.Column(array("d", [rate] * count).tobytes()),
                "gradients_kept": wire.Column(
                    array("d", kept.values()).tobytes(), array("H", [seq - first for seq in kept]).tobytes()
                ),
            },
            pace=pace,
        )
    )


def status() -> dict[str, Any]:
    (run,) = json.loads(sentinel("status", "--json").stdout)
    assert isinstance(run, dict)
    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kept", "rate", "text"),
    [
        (dict.fromkeys(range(8), 0.0), 1e-3, "2 checks, nothing found"),
        (dict.fromkeys(range(8), 0.0), 0.0, "2 checks, found SchedulerMisused"),
        (
            dict.fromkeys(range(3), 0.0),
            1e-3,
            "2 checks, nothing found; 1 of 2 checks not done (too few samples): GradientsNotCleared",
        ),
    ],
)
def test_it_is_said_once(kept: dict[int, float], rate: float, text: str) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        steps(rank, 0, 63, kept=kept, rate=rate)
        assert status()["opening"] is None
        steps(rank, 63, 40, kept={63: 0.0}, rate=rate)
        line = f"first 64 steps: {text}"
        while (notice := rank.expect(wire.Notice)).alert:  # the alert's own notice
            pass
        assert notice.text == f"[sentinel] {line}"
        assert status()["opening"]["text"] == line
        assert line in sentinel("status").stdout
        rank.say(wire.Query(what="nothing"))
        rank.expect(wire.Answer)
        assert not [one for one in rank.arrived if isinstance(one, wire.Notice) and not one.alert]


def test_a_run_that_ends_early_gets_the_result_before_its_closing_line() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="test", identity=rank.identity, takes_closing=True))
        rank.expect(wire.Welcome)
        steps(rank, 0, 20, kept=dict.fromkeys(range(8), 0.0))
        rank.say(wire.Goodbye(next_seq=20))
        rank.expect(wire.Kept)
        kinds = [type(message) for message in rank.arrived if isinstance(message, wire.Notice | wire.Closing)]
        assert kinds == [wire.Notice, wire.Closing]
        (notice,) = (message for message in rank.arrived if isinstance(message, wire.Notice))
        assert notice.text.startswith("[sentinel] first 20 steps: ")


def test_after_the_examination_a_line_says_how_often_each_tier_is_sampled() -> None:
    spacing = {"0": 64, "1": 4, "2": 256, "3": 1024, "9": 1}
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        steps(rank, 0, 512, kept={0: 0.0}, pace=wire.Pace(spacing=spacing, wanted=spacing, costs={}))
        assert rank.expect(wire.Notice).text.startswith("[sentinel] first 64 steps: ")
        steps(rank, 512, 600, kept={512: 0.0})
        assert rank.expect(wire.Notice).text == (
            "[sentinel] from here on: the loss at every step, times every 64 steps, the total gradient norm "
            "every 4 steps, gradients of each layer every 256 steps, weights and their updates every 1,024 steps"
        )
        rank.say(wire.Query(what="nothing"))
        rank.expect(wire.Answer)
        assert not [one for one in rank.arrived if isinstance(one, wire.Notice)]


def test_a_run_that_goes_on_names_the_step_from_which_it_was_examined_again() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(step_offset=6400)
        steps(rank, 0, 70, kept=dict.fromkeys(range(8), 0.0))
        assert rank.expect(wire.Notice).text.startswith("[sentinel] first 64 steps from step 6,400 on: ")


def test_a_run_whose_first_steps_were_not_seen_was_not_examined() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=3026)
        steps(rank, 3026, 70, kept=dict.fromkeys(range(3026, 3036), 0.0))
        text = "first 64 steps: not examined, as the first 3,026 steps were not seen"
        assert rank.expect(wire.Notice).text == f"[sentinel] {text}"
        run = status()
        assert run["opening"]["checks"] == 0
        (rule,) = (rule for rule in run["rules"] if rule["rule"] == "LossNotDecreasing")
        assert rule["values"]["resumed"] == 1.0, "rules take it for a run that goes on"


@pytest.mark.slow
def test_the_next_daemon_of_a_run_does_not_report_it_again() -> None:
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            rank.hello()
            steps(rank, 0, 70, kept=dict.fromkeys(range(8), 0.0))
            line = rank.expect(wire.Notice).text
            kept_in_history(lambda history: history.last_seq(0) == 69 and bool(history.events("opening")))
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=70)
        steps(rank, 70, 70, kept={70: 0.0})
        assert f"[sentinel] {status()['opening']['text']}" == line
        assert not [one for one in rank.arrived if isinstance(one, wire.Notice)]


@pytest.mark.slow
def test_a_daemon_that_takes_over_amid_the_examination_reports_it() -> None:
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            rank.hello()
            steps(rank, 0, 40, kept=dict.fromkeys(range(8), 0.0))
            kept_in_history(lambda history: history.last_seq(0) == 39)
        kill(process)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(next_seq=40)
        steps(rank, 40, 40, kept={40: 0.0})
        assert rank.expect(wire.Notice).text == "[sentinel] first 64 steps: 2 checks, nothing found"


def test_the_key_of_a_rule_is_checked() -> None:
    text = "group: mine\nrules:\n  - {alert: Mine, expr: loss > 1, from_start: %s}\n"
    (rule,) = load_rules(text % "true", "mine.yaml").rules
    assert rule.from_start
    with pytest.raises(RuleError, match="from_start"):
        load_rules(text % "maybe", "mine.yaml")
