"""Of several ranks that leave after the commit the first is named: the others end for want of it."""

from __future__ import annotations

from sentinel import wire
from sentinel.actions.rollback import RollbackAction
from sentinel.actions.rollback_state import Outcome
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt, Ending
from tests.diagnose.test_evidence import case

TERMS = wire.RollbackTerms(every=50, keep=3, margin=0, budget=3)


def test_the_first_that_left_is_named_though_its_end_is_known_last() -> None:
    attempt, sent, ended = Attempt(0, 0.0), [], []
    for number in range(3):
        identity = wire.Identity(run="r", run_id="r", rank=number, world_size=3, pid=1, session=f"s{number}")
        rank = attempt.hello(wire.Hello(version="t", identity=identity, rollback=TERMS, next_seq=260), 0.0)
        rank.snapshots = {100}

    def over(one: Case, outcome: Outcome) -> None:
        ended.append((one.done[-1], outcome.ok))

    action = RollbackAction(attempt, lambda number, message: sent.append(message), over)
    broken = case("LossSpike", "0")
    broken.first_seq = 250
    action.fired(broken, 0.0)
    prepare = next(message for message in sent if isinstance(message, wire.Prepare))
    for number in range(3):
        action.prepared(number, wire.Prepared(id=prepare.id, ok=True, seq=259), 0.0)
    attempt.lose(0, None)
    action.lost(0, 0.5)  # killed, which the kernel is yet to tell
    attempt.lose(1, wire.Goodbye(reason="exception", next_seq=261))
    action.lost(1, 0.5)
    assert ended == []
    attempt.ranks[0].ending = Ending(time=1.0, status=-9, oom=False)
    action.tick(1.0)
    assert ended == [("not rolled back: rank 0 left in the middle of it", False)]
