"""The rollback budget is for one stretch of trouble: unrelated faults, each rolled back, do not end the run."""

from __future__ import annotations

import msgspec

from sentinel import wire
from sentinel.actions.rollback import RollbackAction, quiet
from sentinel.actions.rollback_state import SavedRollbacks
from sentinel.runs import Attempt
from tests.diagnose.test_evidence import case
from tests.run_parts import EndedRollbacks, FakeIncidents, SentMessages

TERMS = wire.RollbackTerms(every=50, keep=3, margin=30, budget=3)
QUIET = 300


class Run:
    """One rank that holds every snapshot it is asked for, and takes its steps."""

    def __init__(self) -> None:
        self.attempt = Attempt(0, 0.0)
        self.link, self.ended = SentMessages(), EndedRollbacks()
        identity = wire.Identity(run="r", run_id="r", rank=0, world_size=1, pid=1, session="s")
        hello = wire.Hello(version="t", identity=identity, rollback=TERMS, step_offset=1000)
        self.rank = self.attempt.hello(hello, 0.0)
        self.action = self.new_action()

    def new_action(self) -> RollbackAction:
        return RollbackAction(self.attempt, self.link, FakeIncidents(), self.ended)

    def broken(self, seq: int) -> str:
        """Report a NaN at this step, and return what was done about it."""
        self.rank.last_seq = seq
        self.rank.snapshots = {start for start in range(0, seq, 50)[-3:]}
        nan = case("NonFiniteLoss", "0")
        nan.first_seq = seq
        self.action.act_on(nan, 0.0)
        if self.action.phase == "preparing":
            prepare = [message for message in self.link.messages if isinstance(message, wire.Prepare)][-1]
            self.action.add_promise(0, wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1), 0.0)
            restored = wire.RolledBack(id=prepare.id, ok=True, to=prepare.to, at=prepare.at, seconds=0.1)
            self.action.add_restore_result(0, restored, 0.0)
        return nan.done[-1]


def test_unrelated_faults_are_each_rolled_back() -> None:
    run = Run()
    for seq in (400, 900, 1400, 1900, 2400, 2900):
        assert run.broken(seq).startswith("rolled back to step"), seq
    assert not [message for message in run.link.messages if isinstance(message, wire.Stop)]


def test_a_fault_that_comes_back_spends_the_budget_and_the_reason_says_what_counted() -> None:
    run = Run()
    for seq in (400, 900, 1000, 1100):
        assert run.broken(seq).startswith("rolled back to step"), seq
    said = run.broken(1300)
    at = [outcome.at + 1000 for outcome in run.ended.outcomes]
    assert said.startswith("the run is stopped: NonFiniteLoss again after 3 rollback(s), which is the budget: ")
    assert all(f"from step {one} to " in said for one in at[1:])
    assert f"from step {at[0]} " not in said
    assert f"until {QUIET} healthy steps" in said
    assert [message for message in run.link.messages if isinstance(message, wire.Stop)]


def test_a_stretch_ends_once_it_was_healthy_for_long_enough() -> None:
    assert quiet(TERMS) == QUIET
    assert quiet(msgspec.structs.replace(TERMS, margin=0)) == 150, "until all snapshots are from after it"
    for distance, goes_on in ((QUIET, True), (QUIET + 1, False)):
        run = Run()
        for seq in (400, 500, 600):
            run.broken(seq)
        said = run.broken(run.ended.outcomes[-1].at + distance)
        assert said.startswith("the run is stopped") == goes_on


def test_the_budget_counts_the_same_after_a_restart_of_the_daemon() -> None:
    for distance, goes_on in ((QUIET, True), (QUIET + 1, False)):
        run = Run()
        for seq in (400, 700, 1000):
            run.broken(seq)
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(run.action.save_state()), type=SavedRollbacks)
        run.action = run.new_action()
        run.action.resume(kept, {}, 0.0)
        assert run.broken(run.ended.outcomes[-1].at + distance).startswith("the run is stopped") == goes_on
