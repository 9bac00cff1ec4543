"""If several ranks leave after the commit, the first one is named: the others end because they lack it."""

from __future__ import annotations

from sentinel import wire
from sentinel.actions.rollback import RollbackAction
from sentinel.runs import Attempt, Ending
from tests.diagnose.test_evidence import case
from tests.run_parts import EndedRollbacks, FakeIncidents, SentMessages

TERMS = wire.RollbackTerms(every=50, keep=3, margin=0, budget=3)


def test_the_first_rank_that_left_is_named_though_its_end_is_known_last() -> None:
    attempt, link, ended = Attempt(0, 0.0), SentMessages(), EndedRollbacks()
    for number in range(3):
        identity = wire.Identity(run="r", run_id="r", rank=number, world_size=3, pid=1, session=f"s{number}")
        rank = attempt.hello(wire.Hello(version="t", identity=identity, rollback=TERMS, next_seq=260), 0.0)
        rank.snapshots = {100}

    action = RollbackAction(attempt, link, FakeIncidents(), ended)
    broken = case("LossSpike", "0")
    broken.first_seq = 250
    action.act_on(broken, 0.0)
    prepare = next(message for message in link.messages if isinstance(message, wire.Prepare))
    for number in range(3):
        action.add_promise(number, wire.Prepared(id=prepare.id, ok=True, seq=259), 0.0)
    attempt.lose(0, None)
    action.drop_rank(0, 0.5)  # killed, which the kernel has not reported yet
    attempt.lose(1, wire.Goodbye(reason="exception", next_seq=261))
    action.drop_rank(1, 0.5)
    assert ended.done == []
    attempt.ranks[0].ending = Ending(time=1.0, status=-9, oom=False)
    action.tick(1.0)
    assert ended.done == [("not rolled back: rank 0 left in the middle of it", False)]
