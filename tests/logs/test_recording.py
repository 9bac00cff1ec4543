"""What the rules see of a log: steps, times, resumes; and of our own history."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.engine import RUN, Entity, Observation, Rewound, Staged
from sentinel.logs import read
from sentinel.logs.recording import RESTART_LIMIT, Recording
from sentinel.steps import Step
from sentinel.store import Store


def recorded(*steps: int | None, **columns: list[float]) -> Recording:
    recording = Recording(Path("x"), "test")
    for row, step in enumerate(steps):
        recording.add(step, None, {"loss": float(row)} | {name: values[row] for name, values in columns.items()})
    return recording


def fed(recording: Recording, *metrics: str) -> list[Observation | Rewound | Staged]:
    return list(recording.observations({metric: metric for metric in metrics or ("loss",)}))


def test_a_log_is_replayed_as_that_of_one_process() -> None:
    first, second = fed(recorded(10, 20))
    assert first.values == {RUN: {"loss": 0.0}, Entity("rank", "0"): {"loss": 0.0}}
    assert [first.seq, second.seq] == [10, 20]


def test_rows_of_one_step_are_one_and_rows_without_a_step_count_on() -> None:
    recording = recorded(4, 4, None, None)
    recording.add(6, None, {"eval": 1.0})
    assert recording.series("loss") == ([4, 5, 6], [1.0, 2.0, 3.0])
    assert recording.series("eval")[0] == [6]


def test_steps_that_have_no_chosen_metric_are_none() -> None:
    recording = recorded(1, 2)
    recording.add(1_000_000, None, {"samples": 1.0})
    recording.add(3, None, {"loss": 9.0})
    assert [observation.seq for observation in fed(recording)] == [1, 2, 3]


def test_a_resumed_log_goes_on_with_new_steps_after_a_rewind() -> None:
    items = fed(recorded(0, 10, 20, 30, 20, 30, 5, 15))
    assert [item.seq if isinstance(item, Observation) else item for item in items] == [
        0, 10, 20, 30, Rewound(10, 30, -11), 31, 41, Rewound(0, 41, -37), 42, 52,
    ]  # fmt: skip


def test_a_log_that_starts_again_from_nothing() -> None:
    items = fed(recorded(3, 4, 1, 2))
    assert items[2] == Rewound(2, 4, -4)


def test_steps_that_start_anew_with_each_epoch_are_counted_on() -> None:
    recording = recorded(0, 1, 2, 0, 1, 0, epoch=[0, 0, 0, 1, 1, 2])
    assert [item.seq for item in fed(recording)] == [0, 1, 2, 3, 4, 5]
    resumed = recorded(0, 1, 2, 1, 2, epoch=[0, 0, 1, 0, 1])
    assert any(isinstance(item, Rewound) for item in fed(resumed))


def test_steps_that_go_back_all_the_time_are_no_steps() -> None:
    items = fed(recorded(*[0, 1] * (RESTART_LIMIT + 2)))
    assert [item.seq for item in items] == list(range(2 * (RESTART_LIMIT + 2)))


def test_time_is_what_the_log_says_and_never_falls() -> None:
    recording = Recording(Path("x"), "test")
    for step, time in enumerate([100.0, None, 90.0, 130.0]):
        recording.add(step, time, {"loss": 1.0})
    assert [item.time for item in fed(recording)] == [100.0, 101.0, 101.0, 130.0]
    assert recording.timed


def test_without_times_the_length_of_the_steps_is_the_clock_or_a_second_each() -> None:
    recording = recorded(0, 10, 20, step_seconds=[0.5, 0.5, math.nan])
    assert [item.time for item in fed(recording, "loss", "step_seconds")] == [0.5, 5.5, 5.5]
    assert [item.time for item in fed(recording)] == [1.0, 11.0, 21.0]
    assert not recording.timed


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Two attempts; in the first, of two ranks, steps 3 and 4 were taken back."""
    path = tmp_path / "demo-1a2b3c.sqlite"
    store = Store(path, run="demo", run_id="demo-1a2b3c")
    for attempt, steps in ((0, 6), (1, 2)):
        identity = wire.Identity(run="demo", run_id="demo-1a2b3c", attempt=attempt, world_size=2)
        hello = wire.Hello(version="0", identity=identity, step_offset=100 * attempt)
        store.attempt(attempt, msgspec.msgpack.encode(hello))
        for seq in range(steps):
            ranks = {0: {"loss": float(seq)}, 1: {"loss": seq + 0.5}}
            store.step(attempt, Step(seq, 1000.0 + seq, ranks, {"loss": seq + 0.25}, None))
    store.event(0, 4, "rollback", ok=True, to=2, at=4)
    store.event(0, 5, "rollback", ok=False, to=2, at=5)
    store.close()
    return path


def test_our_own_history_is_replayed_with_ranks_attempts_and_rollbacks(history: Path) -> None:
    first, second = read(history)
    assert (first.run, second.run) == ("demo-1a2b3c, attempt 0", "demo-1a2b3c, attempt 1")
    items = list(first.observations({"loss": "loss"}))
    assert [item.seq if isinstance(item, Observation) else item for item in items] == [
        0, 1, 2, 3, 4, Rewound(2, 4, 0), 5,
    ]  # fmt: skip
    assert items[0].values == {
        RUN: {"loss": 0.25},
        Entity("rank", "0"): {"loss": 0.0},
        Entity("rank", "1"): {"loss": 0.5},
    }
    assert (second.step_offset, second.series("loss")) == (100, ([100, 101], [0.25, 1.25]))
    assert second.timed
