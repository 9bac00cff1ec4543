"""A rank on an overloaded machine answers late: the rollback is ordered again, a limited number of times."""

from __future__ import annotations

from sentinel import wire
from sentinel.actions.rollback import FRUITLESS, PREPARE_SECONDS, RollbackAction
from sentinel.runs import Attempt
from tests.diagnose.test_evidence import case
from tests.run_parts import EndedRollbacks, FakeIncidents, SentMessages

TERMS = wire.RollbackTerms(every=50, keep=3, margin=0, budget=3)


class Ranks:
    """Two ranks that hold a snapshot, and the action that has just asked them to promise."""

    def __init__(self) -> None:
        self.attempt = Attempt(0, 0.0)
        self.link, self.ended = SentMessages(), EndedRollbacks()
        for number in range(2):
            identity = wire.Identity(run="r", run_id="r", rank=number, world_size=2, pid=1, session=f"s{number}")
            rank = self.attempt.hello(wire.Hello(version="t", identity=identity, rollback=TERMS, next_seq=260), 0.0)
            rank.snapshots = {100}
        self.action = RollbackAction(self.attempt, self.link, FakeIncidents(), self.ended)
        broken = case("LossSpike", "0")
        broken.first_seq = 250
        self.action.act_on(broken, 0.0)

    @property
    def asked(self) -> wire.Prepare:
        return [message for message in self.link.messages if isinstance(message, wire.Prepare)][-1]

    def promise(self, number: int, prepare: wire.Prepare, now: float) -> None:
        self.action.add_promise(number, wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1), now)

    def wait(self, now: float) -> float:
        """Let the current try time out, and return the time after it."""
        now += PREPARE_SECONDS + 1
        self.action.tick(now)
        return now


def test_a_rank_that_answers_too_late_is_asked_again_and_the_run_is_rolled_back() -> None:
    ranks = Ranks()
    first = ranks.asked
    ranks.promise(0, first, 0.1)
    now = ranks.wait(0.0)
    assert [message.id for message in ranks.link.messages if isinstance(message, wire.Abort)] == [first.id] * 2
    second = ranks.asked
    assert second.id != first.id
    assert second.to == first.to
    assert not ranks.ended.done
    ranks.promise(1, first, now)  # the answer that was waited for, to a promise that is over
    for number in range(2):
        ranks.promise(number, second, now + 0.1)
    (verdict, _) = (message for message in ranks.link.messages if isinstance(message, wire.Commit))
    assert verdict.id == second.id


def test_a_silent_rank_is_asked_a_limited_number_of_times() -> None:
    ranks, now, tries = Ranks(), 0.0, 1
    while not ranks.ended.done:
        ranks.promise(0, ranks.asked, now)
        now = ranks.wait(now)
        tries += not ranks.ended.done
    assert tries == 1 + FRUITLESS
    assert ranks.ended.done == [("not rolled back: no answer from rank 1 in 6 s", False)]
