"""What a real daemon tells a supervisor about its job, which is one simulated rank."""

from __future__ import annotations

import math
import subprocess
from array import array
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon.job.supervision import Supervision
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.runs import Run
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.run_parts import watch_run
from tests.stock import RULES

pytestmark = pytest.mark.processes

MARK = "0123456789abcdef"


class Supervisor(SimulatedRank):
    """The connection of a `sentinel run` to the daemon."""

    def ask(self, *, always: bool) -> None:
        self.say(wire.Supervise(mark=MARK, always=always))

    def told(self) -> wire.Standing:
        return self.expect(wire.Standing)


def greet(rank: SimulatedRank, *, resumes: bool = False) -> None:
    rank.say(wire.Hello(version="test", identity=rank.identity, step_offset=100, supervisor=MARK, resumes=resumes))
    rank.expect(wire.Welcome)


@pytest.mark.slow
@pytest.mark.parametrize(("always", "resumes"), [(True, False), (False, True)])
def test_a_fault_without_a_rollback_is_the_supervisors_and_the_daemon_stays_for_it(always: bool, resumes: bool) -> None:
    with daemon_process() as (path, process):
        with Supervisor(path) as supervisor:
            supervisor.ask(always=always)
            with SimulatedRank(path) as rank:
                greet(rank, resumes=resumes)
                assert supervisor.told().attempt == 0
                rank.steps(0, [1.0] * 20 + [math.nan] * 20)
                standing = supervisor.told()
                assert (standing.ends, standing.over, standing.alert) == (True, False, "NonFiniteLoss")
                assert (standing.sign, standing.resumes) == (120, resumes)
                rank.say(wire.Goodbye(reason="exception", detail="OutOfMemoryError: no"))
                last = supervisor.told()
                assert (last.over, last.step, last.raised) == (True, 139, "OutOfMemoryError: no")
            assert process.poll() is None
            with SimulatedRank(path, run_id="r1") as again:
                again.identity = wire.Identity(run="train", run_id="r1", attempt=1, session="new")
                greet(again)
                assert supervisor.told().attempt == 1
                again.say(wire.Goodbye())
                assert supervisor.told().over
        assert ended(process) == 0


@pytest.mark.slow
def test_a_warning_whose_rule_asks_for_a_rollback_says_from_which_step_on_saves_are_bad(tmp_path: Path) -> None:
    """A rule of the user's is a warning unless it says otherwise."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("{group: own, rules: [{alert: LossTooHigh, expr: loss > 20, actions: [rollback]}]}")
    with daemon_process("--rules", str(rules)) as (path, _), Supervisor(path) as supervisor:
        supervisor.ask(always=True)
        with SimulatedRank(path) as rank:
            greet(rank)
            supervisor.told()
            rank.steps(0, [1.0] * 20 + [50.0] * 20)
            standing = supervisor.told()
        assert (standing.ends, standing.alert, standing.sign) == (True, "LossTooHigh", 120)


def test_a_job_that_would_start_from_the_beginning_is_not_ended() -> None:
    with daemon_process() as (path, process):
        with Supervisor(path) as supervisor:
            supervisor.ask(always=False)
            with SimulatedRank(path) as rank:
                greet(rank)
                rank.steps(0, [1.0] * 20 + [math.nan] * 20)
                rank.expect(wire.Notice)
                rank.say(wire.Goodbye())
                supervisor.told()
                last = supervisor.told()
                assert (last.over, last.ends, last.alert) == (True, False, "NonFiniteLoss")
        assert ended(process) == 0


def test_a_job_without_a_supervisor_is_not_said_to_be_ended() -> None:
    watch = watch_run(Run("train", "r1", 0.0), [RULES["NonFiniteLoss"]])
    identity = wire.Identity(run="train", run_id="r1", session="s")
    rank = watch.ingest.hello(wire.Hello(version="test", identity=identity), 0.0)
    losses = wire.Column(array("d", [math.nan]).tobytes())
    seqs, times = array("q", [0]).tobytes(), array("d", [1e9]).tobytes()
    watch.ingest.message(rank, wire.Batch(seqs=seqs, times=times, columns={"loss": losses}), 0.0)
    (case,) = watch.incidents.log.cases.values()
    assert not Supervision(Tenants(service=False)).end_job(watch, case)


@pytest.mark.slow
def test_a_supervisor_that_comes_late_is_waited_for(private_places: Path) -> None:
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            greet(rank)
            rank.say(wire.Goodbye())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        with Supervisor(path) as supervisor:
            supervisor.ask(always=True)
            assert supervisor.told().over
        assert ended(process) == 0
