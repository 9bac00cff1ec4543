"""What the rules see of a log: steps, times, resumes; and of Sentinel's own history."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.engine import RUN, Entity, Observation, Rewound, Staged
from sentinel.runs.steps import RunStep
from sentinel.store import Store
from sentinel.toolkit.logs import read
from sentinel.toolkit.logs.recording import RESTART_LIMIT, Recording


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


def test_steps_without_a_chosen_metric_are_left_out() -> None:
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


def test_steps_that_restart_with_each_epoch_are_counted_on() -> None:
    recording = recorded(0, 1, 2, 0, 1, 0, epoch=[0, 0, 0, 1, 1, 2])
    assert [item.seq for item in fed(recording)] == [0, 1, 2, 3, 4, 5]
    resumed = recorded(0, 1, 2, 1, 2, epoch=[0, 0, 1, 0, 1])
    assert any(isinstance(item, Rewound) for item in fed(resumed))


def test_steps_that_go_back_all_the_time_are_replaced_by_a_count_of_rows() -> None:
    items = fed(recorded(*[0, 1] * (RESTART_LIMIT + 2)))
    assert [item.seq for item in items] == list(range(2 * (RESTART_LIMIT + 2)))


def norms_of(*steps: int, **columns: list[float]) -> list[float]:
    found = [item.values[RUN] for item in fed(recorded(*steps, **columns), "loss", *columns)
             if isinstance(item, Observation)]  # fmt: skip
    return [values["grad_norm"] for values in found if "grad_norm" in values]


def test_a_norm_that_is_not_finite_between_healthy_ones_was_withheld_by_a_scaler() -> None:
    bad = math.inf
    assert norms_of(0, 1, 2, 3, grad_norm=[1, bad, 1, 2]) == [1, 1, 2]
    assert norms_of(*range(18), grad_norm=[*[bad] * 16, 1, 2]) == [1, 2]
    assert norms_of(*range(18), grad_norm=[*[bad] * 17, 1]) == [*[bad] * 17, 1]
    assert norms_of(0, 1, 2, grad_norm=[1, bad, bad]) == [1, bad, bad]
    calm = [1.0] * 9
    assert norms_of(*range(12), grad_norm=[*calm, 1e9, bad, 2]) == [*calm, 1e9, bad, 2], "it had exploded"
    assert norms_of(*range(12), grad_norm=[*calm, 2, bad, 1e9]) == [*calm, 2, bad, 1e9]
    assert norms_of(10, 20, 10, 20, grad_norm=[1, bad, 2, 3]) == [1, bad, 2, 3], "resumed from before it"
    skipped = [0.0, 0.0, 0.0]
    assert norms_of(0, 1, 2, grad_norm=[1, bad, 1], step_skipped=skipped) == [1, bad, 1], "the log says it was applied"


def rates_of(*rates: float) -> list[float]:
    found = fed(recorded(*range(len(rates)), learning_rate=list(rates)), "loss", "learning_rate")
    values = [item.values[RUN] for item in found if isinstance(item, Observation)]
    return [each["learning_rate"] for each in values if "learning_rate" in each]


def test_a_rate_that_was_rounded_to_0_is_left_out() -> None:
    assert rates_of(0.0, 2e-6, 1.1e-5, 3e-6, 1e-6, 0.0, 0.0) == [2e-6, 1.1e-5, 3e-6, 1e-6]
    for whole in ((0.0, 0.0, 0.0), (1e-3, 1e-3, 0.0), (3e-4, 1.234e-5, 1.2e-7, 0.0), (3e-5, 2e-5, 1e-5, 0.0)):
        assert rates_of(*whole) == list(whole)


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
    """Return a history of two attempts of two ranks; in the first, steps 3 and 4 were rolled back."""
    path = tmp_path / "demo-1a2b3c.sqlite"
    store = Store(path, run="demo", run_id="demo-1a2b3c")
    for attempt, steps in ((0, 6), (1, 2)):
        identity = wire.Identity(run="demo", run_id="demo-1a2b3c", attempt=attempt, world_size=2)
        hello = wire.Hello(version="0", identity=identity, step_offset=100 * attempt)
        store.records.begin_attempt(attempt, msgspec.msgpack.encode(hello))
        for seq in range(steps):
            ranks = {0: {"loss": float(seq)}, 1: {"loss": seq + 0.5}}
            store.records.add_step(attempt, RunStep(seq, 1000.0 + seq, ranks, {"loss": seq + 0.25}, None))
    store.records.add_event(0, 4, "rollback", ok=True, to=2, at=4)
    store.records.add_event(0, 5, "rollback", ok=False, to=2, at=5)
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


def test_a_history_is_judged_by_its_own_names_and_by_those_that_the_user_gives(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.sqlite", run="r", run_id="r")
    store.records.begin_attempt(0, b"\x80")
    for seq, more in enumerate(({"cost": 3.0}, {})):
        values = {"loss": 1.0, "lr": 0.1, **more}
        store.records.add_step(0, RunStep(seq, float(seq), {0: values}, values))
    store.close()
    (recording,) = read(tmp_path / "r.sqlite")
    wanted = ("loss", "learning_rate")
    assert recording.choose_columns(wanted, {}) == {"loss": "loss"}, "live, lr is no learning rate either"
    chosen = recording.choose_columns(wanted, {"cost": "loss"})
    assert chosen == {"loss": "cost"}
    seen = [item.values for item in recording.observations(chosen)]
    assert [(one[RUN].get("loss"), one[Entity("rank", "0")].get("loss")) for one in seen] == [(3.0, 3.0), (None, None)]


def test_the_first_step_of_a_history_that_lacks_the_start_is_no_start(tmp_path: Path) -> None:
    """As for the daemon: the rules must not take it for one. A rollback to before it makes them start over there."""
    store = Store(tmp_path / "r.sqlite", run="r", run_id="r")
    store.records.begin_attempt(0, b"\x80")
    for seq in range(500, 506):
        store.records.add_step(0, RunStep(seq, float(seq), {0: {"loss": 1.0}}, {"loss": 1.0}))
    store.records.add_event(0, 502, "rollback", ok=True, to=480, at=502)
    store.close()
    (recording,) = read(tmp_path / "r.sqlite")
    items = recording.observations({"loss": "loss"})
    seen = [item for item in items if isinstance(item, Observation)]
    assert [item.seq for item in seen if "resumed" in item.values[RUN]] == [500, 503]
