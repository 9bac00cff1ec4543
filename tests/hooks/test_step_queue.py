"""The queue between the training thread and the sender's thread, without these threads."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sentinel import wire
from sentinel.engine.windows.steady import Steady
from sentinel.hooks.transport import records
from sentinel.hooks.transport.records import Record, StepQueue

TABLE = wire.LayerTable(digest="", layers=())


def step(seq: int, stream: int = 0, layer_bytes: int = 0, *, time: float = 0.0, held: float | None = None) -> Record:
    block = {"layer_grad_norm": bytes(layer_bytes)} if layer_bytes else {}
    values = {"loss": 1.0} if held is None else {"loss": 1.0, "memory_held_bytes": held}
    return Record(stream, seq, time, TABLE, values, block=block)


def test_steps_come_out_in_order_and_of_one_optimizer_at_a_time() -> None:
    queue = StepQueue()
    for seq, stream in ((0, 0), (1, 0), (0, 1), (2, 0)):
        queue.put(step(seq, stream))
    taken = [[(record.seq, record.stream) for record in queue.take(10)] for _ in range(4)]
    assert taken == [[(0, 0), (1, 0)], [(0, 1)], [(2, 0)], []]


def test_no_more_are_taken_than_one_batch_holds() -> None:
    queue = StepQueue()
    for seq in range(5):
        queue.put(step(seq))
    assert [record.seq for record in queue.take(3)] == [0, 1, 2]
    assert [record.seq for record in queue.take(3)] == [3, 4]


def test_a_dropped_step_is_not_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue drops the oldest records: here all those of the first optimizer."""
    monkeypatch.setattr(records, "QUEUE_STEPS", 20)
    queue = StepQueue()
    queue.put(step(0, 1))
    queue.take(1)
    for stream in (0, 1):
        for seq in range(30):
            queue.put(step(seq, stream))
    assert [(record.seq, record.stream) for record in queue.records] == [(seq, 1) for seq in range(10, 30)]
    assert queue.dropped == 40
    assert queue.next_seq == 30


def test_the_first_steps_stay_until_some_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps wait while the daemon starts, as rules look back on a run's start."""
    monkeypatch.setattr(records, "QUEUE_STEPS", 20)
    monkeypatch.setattr(records, "FIRST_STEPS", 5)
    queue = StepQueue()
    for seq in range(100):
        queue.put(step(seq))
    assert queue.dropped == 75
    assert queue.next_seq == 100
    assert [record.seq for record in queue.take(7)] == [0, 1, 2, 3, 4, 80, 81]
    for seq in range(100, 110):
        queue.put(step(seq))
    assert [record.seq for record in queue.take(3)] == [90, 91, 92], "from then on the oldest makes room"


def test_the_next_step_is_known_when_nothing_waits() -> None:
    queue = StepQueue()
    assert queue.next_seq == 0
    queue.put(step(7))
    assert queue.next_seq == 8
    queue.take(1)
    assert queue.next_seq == 8
    queue.put(step(8))
    queue.clear()
    assert (queue.next_seq, [*queue.records]) == (9, [])


def test_layers_are_left_out_as_long_as_too_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "QUEUE_BYTES", 100)
    queue = StepQueue()
    for seq in range(4):
        queue.put(step(seq, layer_bytes=60))
    assert [bool(record.block) for record in queue.records] == [True, True, False, False]
    queue.take(1)
    queue.put(step(4, layer_bytes=60))
    assert [bool(record.block) for record in queue.records] == [True, False, False, True]


def measure_rise(records: Iterable[Record]) -> float:
    """Return the largest rise that MemoryCreep would see, in bytes."""
    line = Steady("rise")
    held = [(record.seq, record.values.get("memory_held_bytes")) for record in records]
    return max(line.push(seq, value) or 0.0 for seq, value in held if value is not None)


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(records, "time", clock)
    return clock


def test_the_queue_for_a_daemon_that_is_stopped_is_no_leak(clock: Clock) -> None:
    """2,000 steps in 30 s, in which the queue grows by 12 MB, which the heap does not give back."""
    queue, found = StepQueue(), list[Record]()
    for seq in range(2000):
        clock.now += 0.015
        found.append(step(seq, time=clock.now, held=2e9 + seq * 6e3))
    assert measure_rise(found) > 8e6, "the rule would see it"
    for record in found:
        queue.put(record)
    clock.now += 0.1
    taken = [*queue.take(1000), *queue.take(1000)]
    assert [record.seq for record in taken] == list(range(2000))
    assert all(record.values["loss"] == 1.0 for record in taken)
    after = [step(seq, time=clock.now, held=2e9 + 12e6) for seq in range(2000, 4000)]
    assert measure_rise([*taken, *after]) < 2e6
    queue.put(step(4000, time=clock.now, held=2e9))
    assert "memory_held_bytes" in queue.take(1)[0].values


def test_steps_that_wait_for_their_device_keep_their_memory(clock: Clock) -> None:
    queue = StepQueue()
    for seq in range(20):
        queue.put(step(seq, time=clock.now, held=2e9))
        clock.now += 1.0
        taken = queue.take(1) if seq % 2 else queue.take(0)  # the values arrive later and later
        assert all("memory_held_bytes" in record.values for record in taken)
