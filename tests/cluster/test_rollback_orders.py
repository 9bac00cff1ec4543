"""Which daemon orders a rollback of a job over nodes, to which step, and what ends it: daemons without a network."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import pytest

from sentinel import wire
from sentinel.actions.rollback import FRUITLESS, PREPARE_SECONDS
from sentinel.actions.rollback_state import Outcome
from sentinel.actions.stop import StopAction
from sentinel.cluster.orders import NO_ORDERS
from sentinel.cluster.protocol.messages import (
    WORDS,
    Beat,
    NodeRollback,
    Pulse,
    RankReport,
    RollbackOrder,
    decode,
    encode,
)
from sentinel.cluster.protocol.relay import APART, RelayedRollback
from sentinel.cluster.protocol.rollback import ARRIVAL_SECONDS, JobRollbacks
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt
from tests.diagnose.test_evidence import case
from tests.run_parts import SentMessages

TERMS = wire.RollbackTerms(every=50, keep=3, margin=30, budget=2)
SIGN = 240
Told = TypeVar("Told", bound=wire.Message)
SILENT = "(host1) has been silent for 12 s"


class Node:
    """A node's daemon, with one rank that does what the test says."""

    def __init__(self, number: int, held: Iterable[int] = (100, 150, 200), world: int = 2) -> None:
        self.number = number
        self.identity = wire.Identity(
            run="r", run_id="r", rank=number, world_size=world, local_world_size=1, node=number, pid=1, session="s"
        )
        self.attempt, self.link = Attempt(0, 0.0), SentMessages()
        hello = wire.Hello(version="t", identity=self.identity, rollback=TERMS, next_seq=251, snapshots=tuple(held))
        self.rank = self.attempt.hello(hello, 0.0)
        self.cases: list[Case] = []
        self.relay = RelayedRollback(self.attempt, self.link, self, self)
        self.relay.apart = ""
        self.failed: list[str] = []
        self.followed: list[Outcome] = []
        self.stops_without_rollback = False

    def break_down(self, sign: int = SIGN, alert: str = "LossSpike", identity: str = "0.1") -> Case:
        """Fire a rule of this node that asks for a rollback; return its case."""
        fired = msgspec.structs.replace(case(alert), id=identity, first_seq=sign)
        self.cases.append(fired)
        self.relay.act_on(fired, 0.0)
        return fired

    def promise(self, *, id: int = 0, ok: bool = True, reason: str = "") -> int:
        """Answer the last Prepare, or the one with this id; return the id of the last."""
        asked = self.told(wire.Prepare)[-1]
        answer = wire.Prepared(id=id or asked.id, ok=ok, seq=asked.at - 1, reason=reason)
        self.relay.add_promise(self.number, answer, 0.0)
        return asked.id

    def restore(self, *, ok: bool = True, reason: str = "", touched: bool = False) -> None:
        """Answer the last Commit."""
        asked = self.told(wire.Prepare)[-1]
        answer = wire.RolledBack(
            id=asked.id, ok=ok, to=asked.to, at=asked.at, seconds=0.1, reason=reason, touched=touched
        )
        self.relay.add_restore_result(self.number, answer, 0.0)

    def told(self, kind: type[Told]) -> list[Told]:
        return [message for message in self.link.messages if isinstance(message, kind)]

    def list_asking(self, action: str) -> Sequence[Case]:
        return self.cases

    def record_change(self, case: Case) -> None: ...

    def preserve(self) -> None: ...

    def pass_on(self) -> None: ...

    def will_stop(self, case: Case) -> bool:
        return self.stops_without_rollback

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        self.failed.append(outcome.reason)

    def follow_rollback(self, cases: list[Case], outcome: Outcome, done: str) -> None:
        self.followed.append(outcome)
        for one in cases:
            one.state = "rolled_back"


class Job:
    """Nodes, and the coordinator's part on the first of them. Messages between them are encoded as real ones are."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes or (Node(0), Node(1))
        self.restart_coordinator()

    def restart_coordinator(self) -> None:
        """Give the role to another daemon, which knows what its node's history has."""
        first = self.nodes[0]
        self.lead = JobRollbacks(0, first.identity, 2, first.relay.done, first.relay.agreed_stop_reason)

    def exchange(self, now: float = 0.0, *, silent: str = "", cut: Sequence[int] = ()) -> RollbackOrder | None:
        """Let the reports arrive, then the order. `silent`: why node 1 is not heard; `cut`: nodes it does not reach."""
        for node in self.nodes:
            pulse = Pulse(
                node=node.number, incarnation=1, hostname="h", attempt=0, step=0, rollback=node.relay.report()
            )
            self.lead.take_report(
                node.number, decode(encode(pulse), Pulse).rollback, silent if node.number == 1 else "", now
            )
        self.lead.advance(now)
        beat = decode(encode(Beat(epoch=1, expected=2, nodes=(), rollback=self.lead.make_order())), Beat)
        for node in self.nodes:
            if node.number not in cut:
                node.relay.take_order(beat.rollback, now)
        return beat.rollback

    def told(self, kind: type[Told]) -> list[Told]:
        return [message for node in self.nodes for message in node.told(kind)]


def test_all_nodes_go_back_to_the_newest_snapshot_that_all_hold() -> None:
    job = Job(Node(0, (100, 150, 200)), Node(1, (50, 100, 150)))
    zero, one = job.nodes
    broken = one.break_down()
    job.exchange()
    (first,), (second,) = zero.told(wire.Prepare), one.told(wire.Prepare)
    assert first == second
    assert first.to == 150
    assert broken.done == ("rolling back to step 150",)
    zero.promise()
    job.exchange()
    assert not job.told(wire.Commit)
    one.promise()
    job.exchange()
    assert [commit.id for commit in job.told(wire.Commit)] == [first.id] * 2
    job.exchange()
    assert len(job.told(wire.Commit)) == 2, "a repeated order is said once"
    for node in job.nodes:
        node.restore()
        job.exchange()
    assert [(o.ok, o.to, o.at) for node in job.nodes for o in node.followed] == [(True, 150, first.at)] * 2
    assert broken.done == (f"rolled back to step 150 at the exit of step {first.at}",)
    order = job.exchange()
    assert order is not None
    assert order.words == ()


def test_a_node_alone_orders_nothing() -> None:
    node = Node(1)
    node.relay.apart = APART
    asked = node.break_down()
    assert asked.done == (f"rolling back: waits while {APART}",)
    node.relay.apart = "the coordinator is not heard"
    node.relay.tick(1.0)
    assert asked.done == ("rolling back: waits while the coordinator is not heard",)
    node.relay.tick(31.0)
    assert asked.done == ("not rolled back: the coordinator is not heard",)
    node.relay.no_orders = NO_ORDERS
    assert node.break_down(identity="0.2").done == (f"not rolled back: {NO_ORDERS}",)
    unheard = Node(1)
    asked = unheard.break_down()
    unheard.relay.tick(31.0)
    assert asked.done == ("not rolled back: no word of the job's coordinator in 30 s",)
    assert node.link.messages == unheard.link.messages == []


def test_a_missing_node_is_named_and_none_is_asked() -> None:
    job = Job()
    broken = job.nodes[0].break_down()
    job.exchange(silent=SILENT)
    assert not job.lead.make_order().words, "it may be heard in a moment"
    job.exchange(ARRIVAL_SECONDS + 1, silent=SILENT)
    assert broken.done == (f"not rolled back: node 1 {SILENT}",)
    assert job.nodes[0].failed == [f"node 1 {SILENT}"]
    assert not job.told(wire.Prepare)


def test_a_node_that_was_never_heard_or_is_at_another_attempt_is_missing() -> None:
    alone = Job(Node(0))
    broken = alone.nodes[0].break_down()
    alone.exchange()
    alone.exchange(ARRIVAL_SECONDS + 1)
    assert broken.done == ("not rolled back: 1 node never heard",)
    job = Job()
    job.nodes[1].attempt.number = 1
    broken = job.nodes[0].break_down()
    job.exchange()
    job.exchange(ARRIVAL_SECONDS + 1)
    assert broken.done == ("not rolled back: node 1 is at attempt 1, not 0",)
    assert not job.told(wire.Prepare) + alone.told(wire.Prepare)


def test_a_node_that_does_not_answer_in_time_means_none() -> None:
    job = Job()
    broken = job.nodes[0].break_down()
    now = 0.0
    for _ in range(FRUITLESS + 2):
        job.exchange(now)
        if broken.done[-1].startswith("rolling back"):
            job.nodes[0].promise()
        job.exchange(now)
        now += PREPARE_SECONDS + 10
    assert "no answer from rank 1 in" in broken.done[-1]
    assert not job.told(wire.Commit)
    for node in job.nodes:
        asked = {prepare.id for prepare in node.told(wire.Prepare)}
        assert len(asked) == FRUITLESS + 1
        assert {abort.id for abort in node.told(wire.Abort)} == asked


def test_a_refusal_means_no_rollback_and_is_reported() -> None:
    job = Job()
    broken = job.nodes[0].break_down()
    job.exchange()
    job.nodes[0].promise()
    job.nodes[1].promise(ok=False, reason="the ranks cannot agree")
    job.exchange()
    assert broken.done == ("not rolled back: the ranks cannot agree",)
    assert len(job.told(wire.Abort)) == 2
    assert not job.told(wire.Commit)


def test_a_case_that_fires_when_the_same_alert_of_another_node_is_over_is_not_answered_with_its_end() -> None:
    job = Job()
    first = job.nodes[1].break_down()
    job.exchange()
    job.nodes[0].promise()
    job.nodes[1].promise(ok=False, reason="the ranks cannot agree")
    job.exchange(cut=(1,))  # it still asks
    second = job.nodes[0].break_down()
    job.exchange(cut=(1,))
    assert second.done[-1].startswith("rolling back to step")
    job.exchange()
    assert first.done == ("not rolled back: the ranks cannot agree",)
    for node in job.nodes:
        node.promise()
    job.exchange()
    assert len(job.told(wire.Commit)) == 2


def test_once_the_ranks_are_told_to_stop_no_case_begins_a_rollback() -> None:
    job = Job()
    zero, one = job.nodes
    zero.break_down()
    job.exchange()
    for node in job.nodes:
        node.promise()
    job.exchange()
    one.restore()
    zero.restore(ok=False, reason="CUDA error", touched=True)
    second = one.break_down(identity="0.2")
    job.exchange()
    assert len(job.told(wire.Stop)) == 2
    assert len(job.told(wire.Prepare)) == 2, "those of the first"
    assert second.done[-1].startswith("the run is stopped: rank 0 is not in the state that was agreed on")


def test_words_about_a_rollback_that_was_refused_do_not_end_the_stop_that_is_asked_for_since() -> None:
    job = Job()
    one = job.nodes[1]
    one.stops_without_rollback = True
    stop = StopAction(one.relay, one)
    case = one.break_down(sign=60)
    stop.act_on(case, 0.0)
    job.exchange()
    assert case.done[0].startswith("not rolled back: no snapshot")
    stop.tick(0.1)
    late = job.lead.make_order()  # the coordinator has not heard of the stop yet
    one.relay.take_order(late, 0.2)
    stop.tick(0.3)
    job.exchange(0.4)
    assert case.done[-1].startswith("not stopped: rank 0 cannot leave at an agreed step")


def test_a_rank_that_was_past_the_step_is_asked_for_a_later_one_and_a_late_promise_counts_for_nothing() -> None:
    job = Job()
    job.nodes[1].break_down()
    job.exchange()
    first = job.nodes[0].promise()
    job.nodes[1].promise(ok=False)
    job.exchange()
    assert [abort.id for abort in job.told(wire.Abort)] == [first] * 2, "the former one, though no beat said so"
    job.nodes[0].promise()
    job.nodes[1].promise(id=first)
    job.exchange()
    assert not job.told(wire.Commit)
    second = job.nodes[1].promise()
    assert second != first
    job.exchange()
    assert [commit.id for commit in job.told(wire.Commit)] == [second] * 2


def test_a_coordinator_that_dies_before_the_commit_leaves_none_bound_and_the_next_one_asks_again() -> None:
    job = Job()
    job.nodes[1].break_down()
    job.exchange()
    first = job.nodes[0].promise()
    job.restart_coordinator()
    job.exchange()
    assert [abort.id for abort in job.told(wire.Abort)] == [first] * 2
    job.nodes[0].promise()
    job.nodes[1].promise(id=first)
    job.exchange()
    assert not job.told(wire.Commit)
    second = job.nodes[1].promise()
    job.exchange()
    assert [commit.id for commit in job.told(wire.Commit)] == [second] * 2


def test_a_coordinator_that_dies_between_two_commits_leaves_it_to_the_ranks() -> None:
    """One node has the commit, the other an abort: the ranks' own vote decides."""
    job = Job()
    zero, one = job.nodes
    broken = one.break_down()
    job.exchange()
    for node in job.nodes:
        node.promise()
    job.exchange(cut=[1])
    assert (len(zero.told(wire.Commit)), len(one.told(wire.Commit))) == (1, 0)
    promised = zero.told(wire.Prepare)[0].id
    zero.restore(ok=False, reason="only 1 of 2 ranks came")
    job.restart_coordinator()
    job.exchange(cut=[0])
    assert [abort.id for abort in one.told(wire.Abort)] == [promised]
    assert not zero.told(wire.Abort)
    assert not zero.followed + one.followed
    assert broken.done[-1].startswith("rolling back"), "the next coordinator asks again"


def test_a_node_whose_ranks_went_back_knows_it_without_the_coordinator_and_it_counts() -> None:
    job = Job()
    for round in range(TERMS.budget + 1):
        broken = job.nodes[0].break_down(SIGN, identity=f"0.{round}")
        job.nodes[1].break_down(SIGN, identity=f"0.{round}")
        job.exchange()
        if broken.done[-1].startswith("rolling back"):
            for node in job.nodes:
                node.promise()
            job.exchange()
            for node in job.nodes:
                node.restore()
            job.restart_coordinator()
    assert "LossSpike again after 2 rollback(s), which is the budget" in broken.done[-1]
    assert [len(node.told(wire.Stop)) for node in job.nodes] == [1, 1]
    assert len(job.nodes[1].followed) == TERMS.budget


@pytest.mark.parametrize(("held", "expected"), [((100, 150, 200), [200, 150]), ((200,), [200, 200])])
def test_the_same_fault_again_on_both_nodes_goes_further_back_where_there_is_more(
    held: tuple[int, ...], expected: list[int]
) -> None:
    """The case that fires on the other node is the same fault, and no reason against the snapshot."""
    job = Job(Node(0, held), Node(1, held))
    for sign in (SIGN, 225):
        for node in job.nodes:
            node.break_down(sign, identity=f"0.{sign}")
        job.exchange()
        for node in job.nodes:
            node.promise()
        job.exchange()
        for node in job.nodes:
            node.restore()
        job.exchange()
    assert [[outcome.to for outcome in node.followed] for node in job.nodes] == [expected] * 2


def test_a_restore_that_fails_in_part_stops_the_ranks_of_all_nodes() -> None:
    job = Job()
    job.nodes[0].break_down()
    job.exchange()
    for node in job.nodes:
        node.promise()
    job.exchange()
    job.nodes[0].restore()
    job.nodes[1].restore(ok=False, touched=True, reason="half of it")
    job.exchange()
    assert [len(node.told(wire.Stop)) for node in job.nodes] == [1, 1]
    assert "rank 1 is not in the state that was agreed on: half of it" in job.nodes[1].told(wire.Stop)[0].reason


def test_signs_on_one_node_withhold_the_snapshots_of_all() -> None:
    job = Job()
    zero, one = job.nodes
    assert one.relay.withhold(["LossSpike"]) == ("LossSpike",)
    job.exchange()
    assert zero.relay.withhold([]) == ("node 1",)
    assert one.relay.withhold([]) == ()
    job.exchange()
    assert zero.relay.withhold([]) == ()
    one.relay.withhold(["LossSpike"])
    job.exchange()
    assert zero.relay.withhold([]) == ("node 1",)
    job.exchange(silent=SILENT)
    assert zero.relay.withhold([]) == (), "node 1 may be silent for hours"


def test_a_case_that_names_all_parameters_of_a_model_asks_as_any_other() -> None:
    job = Job()
    broken = job.nodes[0].break_down()
    names = tuple(f"model.layers.{number // 384}.mlp.experts.{number % 384}.weight" for number in range(20_000))
    broken.diagnosis = msgspec.structs.replace(broken.diagnosis, layers=names)
    job.exchange()
    assert job.told(wire.Prepare)


def test_an_order_of_another_attempt_is_not_passed_on() -> None:
    node = Node(0)
    node.relay.take_order(RollbackOrder(attempt=1, message=wire.Prepare(id=1, at=300, to=100)), 0.0)
    assert not node.link.messages


class Loop:
    """A rank's part: it binds itself, waits ten turns for a verdict, and restores if all ranks have the commit."""

    def __init__(self, node: Node, chance: random.Random) -> None:
        self.node, self._chance = node, chance
        self.bound: wire.Prepare | None = None
        self.promised: set[int] = set()
        self.committed: dict[int, wire.Prepare] = {}
        self.restored: set[int] = set()
        self._read = self._waited = 0

    def turn(self) -> None:
        """Take the daemon's messages since the last turn."""
        for message in self.node.link.messages[self._read :]:
            match message:
                case wire.Prepare() if self.bound is None:
                    late = self._chance.random() < 0.2
                    if not late:
                        self.bound, self._waited = message, 0
                        self.promised.add(message.id)
                    self._answer(message, ok=not late)
                case wire.Abort() if self.bound is not None and self.bound.id == message.id:
                    self.bound = None
                case wire.Commit() if self.bound is not None and self.bound.id == message.id:
                    self.committed[message.id], self.bound = self.bound, None
                case _:
                    pass
        self._read = len(self.node.link.messages)
        self._waited += 1
        if self.bound is not None and self._waited > 10:
            self.end(self.bound, ok=False)
            self.bound = None

    def end(self, promise: wire.Prepare, *, ok: bool) -> None:
        """Report the result of the vote."""
        if ok:
            self.restored.add(promise.id)
        answer = wire.RolledBack(
            id=promise.id, ok=ok, to=promise.to, at=promise.at, seconds=0.1, reason="" if ok else "no"
        )
        self.node.relay.add_restore_result(self.node.number, answer, 0.0)

    def _answer(self, asked: wire.Prepare, *, ok: bool, reason: str = "") -> None:
        answer = wire.Prepared(id=asked.id, ok=ok, seq=asked.at - 1, reason=reason)
        self.node.relay.add_promise(self.node.number, answer, 0.0)


def vote(loops: Sequence[Loop], over: set[int]) -> None:
    """Let the ranks with a commit look at the others: all have it, one goes on without it, or it may still come."""
    for identity in {identity for loop in loops for identity in loop.committed} - over:
        pending = [loop for loop in loops if loop.bound is not None and loop.bound.id == identity]
        if not pending:
            over.add(identity)
            agreed = all(identity in loop.committed for loop in loops)
            for loop in loops:
                if (promise := loop.committed.get(identity)) is not None:
                    loop.end(promise, ok=agreed)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(200))
def test_no_commit_without_all_promises_and_no_rank_goes_back_alone(seed: int) -> None:
    """Orders and reports are lost, the coordinator's daemon dies, ranks are late."""
    chance, job, over = random.Random(seed), Job(), set[int]()
    loops = [Loop(node, chance) for node in job.nodes]
    asked = [node.break_down() for node in job.nodes if node.number == seed % 2 or chance.random() < 0.5]
    for turn in range(120):
        calm = turn >= 40
        if not calm and chance.random() < 0.1:
            job.restart_coordinator()
        if calm or chance.random() < 0.8:
            job.exchange(float(turn), cut=() if calm else [n for n in (0, 1) if chance.random() < 0.3])
        for loop in loops:
            if calm or chance.random() < 0.7:
                loop.turn()
        vote(loops, over)
        for node in job.nodes:
            committed = {commit.id for commit in node.told(wire.Commit)}
            assert all(committed <= loop.promised for loop in loops)
    assert loops[0].restored == loops[1].restored
    assert [len(node.followed) for node in job.nodes] == [len(loops[0].restored)] * 2
    for one in asked:
        assert one.state == "rolled_back" or one.done[-1].startswith("not rolled back: "), one.done


LONG = "RuntimeError('" + "size mismatch for layer.weight; " * 10_000 + "')"


def test_a_rank_that_says_more_than_a_message_holds_keeps_no_order_from_the_nodes() -> None:
    job = Job()
    zero, one = job.nodes
    broken = one.break_down()
    job.exchange()
    zero.promise()
    one.promise(ok=False, reason=LONG)
    job.exchange()
    job.exchange()
    assert broken.done[-1].startswith("not rolled back: RuntimeError(")
    assert len(broken.done[-1]) == WORDS


def test_ranks_in_a_mixed_state_are_stopped_however_long_the_reason_is() -> None:
    job = Job()
    zero, one = job.nodes
    one.break_down()
    job.exchange()
    for node in job.nodes:
        node.promise()
    job.exchange()
    zero.restore()
    one.restore(ok=False, touched=True, reason=LONG)
    job.exchange()
    job.exchange()
    assert len(job.told(wire.Stop)) == 2


def test_of_512_ranks_that_do_not_promise_every_beat_can_be_read() -> None:
    node = Node(0)
    identity = msgspec.structs.replace(node.identity, world_size=512, local_world_size=8)
    lead, fired = JobRollbacks(0, identity, 64), msgspec.structs.replace(case("LossSpike"), id="0.1", first_seq=SIGN)
    now, words = 0.0, ""
    while not words.startswith("not rolled back"):
        for number in range(64):
            ranks = tuple(
                RankReport(rank=8 * number + one, state="live", last_seq=250, version="t", held=(150,), terms=TERMS)
                for one in range(8)
            )
            report = NodeRollback(attempt=0, step_offset=0, step_seconds=0.1, ranks=ranks)
            if number == 1:
                report = msgspec.structs.replace(report, cases=(fired,), asks=("0.1",))
            lead.take_report(number, report, "", now)
        lead.advance(now)
        beat = decode(encode(Beat(epoch=1, expected=64, nodes=(), rollback=lead.make_order())), Beat)
        words = beat.rollback.words[0].done[0] if beat.rollback is not None and beat.rollback.words else ""
        now += 1.0
        assert now < 100.0
    assert "no answer from ranks 0 to 511 in" in words


def test_a_promise_that_was_taken_back_is_not_committed() -> None:
    """The coordinator does not act for a moment, as its beats are late, and then goes on with its order."""
    job = Job()
    zero, one = job.nodes
    one.break_down()
    job.exchange()
    taken_back = zero.promise()
    for node in job.nodes:
        node.relay.take_order(None, 0.5)
    one.promise()  # this promise was on its way
    assert {abort.id for abort in job.told(wire.Abort)} == {taken_back}
    for now in (1.0, 1.1, 1.2):
        job.exchange(now)
    assert not job.told(wire.Commit)
    again = [node.promise() for node in job.nodes]
    assert taken_back not in again
    job.exchange(1.3)
    job.exchange(1.4)
    assert [commit.id for commit in job.told(wire.Commit)] == again


def test_a_node_that_took_its_promise_back_says_so_though_it_hears_no_order() -> None:
    job = Job()
    zero, one = job.nodes
    one.break_down()
    job.exchange()
    taken_back = zero.promise()
    job.exchange(cut=(0,))
    zero.relay.apart = APART
    zero.relay.tick(1.0)
    one.promise()
    job.exchange(2.0, cut=(0,))
    assert taken_back not in [commit.id for commit in job.told(wire.Commit)]
