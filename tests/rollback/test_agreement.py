"""All ranks roll back at the exit of the same step, or none does, whatever the delays and whichever process dies."""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bench.armed import RecordingSession
from sentinel import wire
from sentinel.hooks.rollback.agreement import TwoPhaseCommit
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from tests.rollback.training import Training, assert_same, batches, of_type
from tests.waiting import until

DATA = batches(16)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Let threads switch every few bytecodes, so that thousands of tries meet the rare interleavings."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Rank:
    """A rank with one weight, its connection (a thread that delivers late, in order), and a record of its weights."""

    def __init__(self, answers: queue.Queue[tuple[int, wire.FromRank]], number: int, seed: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.restorer = Restorer(
            Rollback(every=1000, keep=2, margin=0),
            models=[self.model],
            optimizers=[self.optimizer],
            session=RecordingSession(send=lambda message: answers.put((number, message))),
        )
        self.seq = -1
        self.weights: list[float] = []
        self.inbox: queue.Queue[wire.ToRank | None] = queue.Queue()
        self._delays = random.Random(seed)
        self.connection = threading.Thread(target=self._deliver, daemon=True)
        self.connection.start()

    def _deliver(self) -> None:
        while (message := self.inbox.get()) is not None:
            for _ in range(self._delays.choice([0, 0, 10, 100, 1000])):
                pass
            self.restorer.receive(message)

    def step(self) -> None:
        self.seq += 1
        self.restorer.enter_step(self.seq)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.restorer.exit_step(self.seq, skipped=False)
        self.weights.append(float(self.model.weight.detach().sum()))


class Coordinator:
    """The daemon's part: orders a rollback at a random moment, for a step that may be over before the order arrives."""

    def __init__(self, ranks: list[Rank], answers: queue.Queue[tuple[int, wire.FromRank]], seed: int) -> None:
        self._ranks, self._answers = ranks, answers
        self._random = random.Random(seed)
        self.committed: dict[int, int] = {}
        self.refused = 0

    def command(self, number: int) -> None:
        at = max(rank.seq for rank in self._ranks) + self._random.randint(0, 4)
        self._tell(wire.Prepare(id=number, at=at, to=0))
        promises = [self._answer(wire.Prepared, number) for _ in self._ranks]
        self.refused += any(not promise.ok for promise in promises)
        if all(promise.ok for promise in promises) and self._random.random() < 0.8:
            self._tell(wire.Commit(id=number))
            results = [self._answer(wire.RolledBack, number) for _ in self._ranks]
            assert all(result.ok and result.at == at for result in results), results
            self.committed[number] = at
        else:
            self._tell(wire.Abort(id=number))

    def _tell(self, message: wire.ToRank) -> None:
        for rank in self._random.sample(self._ranks, len(self._ranks)):
            rank.inbox.put(message)

    def _answer(self, kind: type, number: int) -> Any:
        while True:
            _, message = self._answers.get(timeout=60)
            if isinstance(message, kind):
                assert message.id == number
                return message


@pytest.mark.parametrize(("world", "commands"), [(1, 500), pytest.param(4, 600, marks=pytest.mark.slow)])
def test_applied_at_the_same_step_everywhere_or_nowhere(world: int, commands: int, hasty_threads: None) -> None:
    """All ranks restore at the same step, or none does.

    Ranks meet at each step, as in a collective, and so may be one step apart. If one of them restored at another step
    than the rest, its weights would differ from then on.
    """
    answers: queue.Queue[tuple[int, wire.FromRank]] = queue.Queue()
    ranks = [Rank(answers, number, seed=number) for number in range(world)]
    collective = threading.Barrier(world)
    over = threading.Event()
    ready = threading.Barrier(world + 1)

    def train(rank: Rank) -> None:
        last = False
        while not last:
            collective.wait(timeout=60)
            last = over.is_set() and rank.seq > 10  # one step more, so that a rank that read it late is not left alone
            rank.step()
            if rank.seq == 2:
                ready.wait(timeout=60)
            if last:
                collective.abort()

    def guarded(rank: Rank) -> None:
        try:
            train(rank)
        except threading.BrokenBarrierError:
            assert over.is_set()

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    ready.wait(timeout=60)
    coordinator = Coordinator(ranks, answers, seed=world)
    try:
        for number in range(commands):
            coordinator.command(number)
    finally:
        over.set()
        for rank in ranks:
            rank.inbox.put(None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(coordinator.committed) > commands // 10
    assert coordinator.refused > commands // 100
    steps = min(len(rank.weights) for rank in ranks)
    for rank in ranks:
        assert rank.weights[:steps] == ranks[0].weights[:steps]
    restored = [seq for seq, weight in enumerate(ranks[0].weights) if seq and weight == ranks[0].weights[0]]
    assert restored == sorted(coordinator.committed.values())


def test_a_promise_is_kept_or_was_never_given(hasty_threads: None) -> None:
    """The bare protocol, with a loop as fast as possible: where a rank answered `ok`, its loop waits at that step."""
    promise = TwoPhaseCommit()
    kept: queue.Queue[tuple[int, int, int]] = queue.Queue()
    over = threading.Event()

    def loop() -> None:
        seq = -1
        while not over.is_set():
            seq += 1
            if promise.reach_step(seq):
                prepare, verdict = promise.wait(30.0)
                if prepare is not None and verdict is not None:
                    kept.put((verdict.id, prepare.at, seq))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    chance = random.Random(0)
    committed = late = 0
    for number in range(20_000):
        at = promise.exited + chance.randint(0, 3)
        answer = promise.prepare(wire.Prepare(id=number, at=at, to=0))
        late += not answer.ok
        if answer.ok and chance.random() < 0.5:
            promise.decide(wire.Commit(id=number))
            assert kept.get(timeout=30) == (number, at, at)
            committed += 1
        elif answer.ok:
            promise.decide(wire.Abort(id=number))
    over.set()
    thread.join(30)
    assert not thread.is_alive()
    assert kept.empty()
    assert committed > 100
    assert late > 100


def test_a_later_promise_is_not_taken_for_the_one_that_was_reached() -> None:
    """The loop has reached its target; before it can ask, that promise is aborted and one for a later step is given."""
    promise = TwoPhaseCommit()
    assert promise.prepare(wire.Prepare(id=1, at=5, to=0)).ok
    assert promise.reach_step(5)
    promise.decide(wire.Abort(id=1))
    assert promise.prepare(wire.Prepare(id=2, at=9, to=0)).ok
    promise.decide(wire.Commit(id=2))
    assert promise.wait(0.0) == (None, None)
    assert promise.reach_step(9)
    assert promise.wait(0.0) == (wire.Prepare(id=2, at=9, to=0), wire.Commit(id=2))
    assert not promise.bound


# One rank, step by step.


def armed(**more: Any) -> tuple[Training, Restorer, list[Any]]:
    training = Training()
    restorer, sent = training.arm(**more)
    for seq in range(7):
        training.step(DATA[seq])
    assert restorer.held == (0, 5)
    sent.clear()
    return training, restorer, sent


def test_a_daemon_that_dies_before_its_verdict(caplog: pytest.LogCaptureFixture) -> None:
    untouched = Training()
    for seq in range(12):
        untouched.step(DATA[seq])
    expected = untouched.state()

    training, restorer, sent = armed(verdict_seconds=0.05)
    restorer.receive(wire.Prepare(id=1, at=8, to=5))
    for seq in range(7, 12):
        training.step(DATA[seq])
    (promise, answer) = [m for m in sent if isinstance(m, wire.Prepared | wire.RolledBack)]
    assert promise == wire.Prepared(id=1, ok=True, seq=6)
    assert (answer.ok, answer.at) == (False, 8)
    assert "no verdict within 0.05 s" in answer.reason
    assert "no verdict" in caplog.text
    assert_same(training.state(), expected)

    restorer.receive(wire.Commit(id=1))  # the verdict comes too late, and is ignored
    restorer.receive(wire.Prepare(id=2, at=12, to=5))
    restorer.receive(wire.Commit(id=2))
    training.step(DATA[12])
    assert of_type(sent, wire.RolledBack)[-1].ok


def test_refused_when_the_step_is_over() -> None:
    """A refusal without a reason makes the daemon ask again for a later step."""
    training, restorer, sent = armed()
    restorer.receive(wire.Prepare(id=1, at=6, to=5))
    assert sent == [wire.Prepared(id=1, ok=False, seq=6)]
    training.step(DATA[7])
    assert not of_type(sent, wire.RolledBack)


@pytest.mark.parametrize("to", [3, 10])
def test_refused_when_the_snapshot_is_not_held(to: int) -> None:
    _, restorer, sent = armed()
    restorer.receive(wire.Prepare(id=1, at=20, to=to))
    assert sent == [wire.Prepared(id=1, ok=False, seq=6, reason=f"no snapshot of step {to} is held, but [0, 5]")]


def test_a_rank_that_is_bound_answers_no_other_order_until_that_one_is_over() -> None:
    """Another coordinator may send one when it asks again after a time-out; a refusal would be final."""
    training, restorer, sent = armed()
    restorer.receive(wire.Prepare(id=1, at=8, to=5))
    restorer.receive(wire.Prepare(id=2, at=9, to=0))
    restorer.receive(wire.Commit(id=1))
    for seq in range(7, 10):
        training.step(DATA[seq])
    restorer.receive(wire.Prepare(id=3, at=12, to=0))
    assert [(m.id, m.ok) for m in of_type(sent, wire.Prepared)] == [(1, True), (3, True)]
    assert [(m.id, m.to, m.at) for m in of_type(sent, wire.RolledBack)] == [(1, 5, 8)]


def test_an_abort_before_the_step_and_one_while_it_waits() -> None:
    training, restorer, sent = armed(verdict_seconds=60.0)
    restorer.receive(wire.Prepare(id=1, at=8, to=5))
    restorer.receive(wire.Abort(id=1))
    training.step(DATA[7])
    training.step(DATA[8])
    restorer.receive(wire.Prepare(id=2, at=9, to=5))
    threading.Timer(0.05, restorer.receive, [wire.Abort(id=2)]).start()
    training.step(DATA[9])
    assert not of_type(sent, wire.RolledBack)
    assert training.seq == 10


def test_an_abort_lets_the_loop_go_that_waits() -> None:
    """Else it would stand there until the time-out."""
    commit = TwoPhaseCommit()
    commit.prepare(wire.Prepare(id=1, at=5, to=2))
    assert commit.reach_step(5)
    found: list[Any] = []
    loop = threading.Thread(target=lambda: found.append(commit.wait(600.0)), daemon=True)
    loop.start()
    until(lambda: sys._current_frames()[loop.ident or 0].f_code.co_name == "wait", "the loop, to where it waits")
    commit.decide(wire.Abort(id=1))
    loop.join(30.0)
    assert found == [(None, None)]


def test_a_promised_snapshot_is_not_given_up() -> None:
    """At a multiple of `every` before the promised step no snapshot is taken, as it would replace the promised one."""
    training, restorer, sent = armed()
    restorer.receive(wire.Prepare(id=1, at=12, to=0))
    for seq in range(7, 12):
        training.step(DATA[seq])
    assert restorer.held == (0, 5)
    restorer.receive(wire.Commit(id=1))
    training.step(DATA[12])
    (answer,) = of_type(sent, wire.RolledBack)
    assert (answer.ok, answer.void) == (True, (5,))
    assert restorer.held == (0,)
