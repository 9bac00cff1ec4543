"""How long a rank waits at a step in an agreement, at most, as docs/rollback.md and docs/cluster.md promise.

The tests have their own clock, which advances only while the rank waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel import wire
from sentinel.hooks.core import store_client
from sentinel.hooks.core.store_client import StoreLost
from sentinel.hooks.rollback import agreement, step_guard
from tests.rollback.training import Training, batches, of_type

DATA = batches(10)
WORLD = 4
AT = 8


class Clock:
    """A clock that advances where something waits, and by what the test adds."""

    def __init__(self) -> None:
        self.now = 1e6
        self.when_waited: Callable[[], object] = lambda: None
        """Called at the end of each wait for the verdict."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > 1e6 + 5e3:
            pytest.fail("it waits without end")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class Condition(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            clock.sleep(timeout if timeout is not None else 1e9)
            clock.when_waited()
            return predicate()

    faked = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep, perf_counter=time.perf_counter)
    monkeypatch.setattr(agreement, "time", faked)
    monkeypatch.setattr(step_guard, "time", faked)
    monkeypatch.setattr(agreement, "threading", SimpleNamespace(Condition=Condition))
    monkeypatch.setattr(agreement, "place", lambda: (0, WORLD))
    return clock


def stand(clock: Clock, folder: Path, *, step_seconds: float, committed: bool) -> tuple[float, str]:
    """Let rank 0 promise and come to the step alone; return how long it stood there, and why it did not roll back.

    With `committed`, the commit comes at the last moment.
    """
    training = Training()
    restorer, sent = training.arm(find_directory=lambda: folder / "run")
    for seq in range(AT - 1):
        training.step(DATA[seq])
    restorer.receive(wire.Prepare(id=1, at=AT, to=5))
    if committed:
        clock.when_waited = lambda: restorer.receive(wire.Commit(id=1))
    training.step(DATA[AT - 1])
    clock.sleep(step_seconds)
    begun = clock.now
    training.step(DATA[AT])
    restorer.close()
    (promise,) = of_type(sent, wire.Prepared)
    assert promise.ok, promise.reason
    (answer,) = of_type(sent, wire.RolledBack)
    assert not answer.ok
    return clock.now - begun, answer.reason


def test_ten_seconds_for_the_verdict(clock: Clock, tmp_path: Path) -> None:
    stood, why = stand(clock, tmp_path, step_seconds=1.0, committed=False)
    assert why == "no verdict within 10 s: went on without"
    assert stood == pytest.approx(10)


@pytest.mark.parametrize(("step_seconds", "most"), [(0.5, 22), (1000.0, 60)])
def test_a_minute_with_the_wait_for_the_other_ranks(
    step_seconds: float, most: float, clock: Clock, tmp_path: Path
) -> None:
    stood, why = stand(clock, tmp_path, step_seconds=step_seconds, committed=True)
    assert why.startswith(f"only 1 of {WORLD} ranks came to step {AT}")
    assert stood == pytest.approx(most, abs=0.1)


def test_two_minutes_where_the_store_of_several_nodes_takes_its_time_for_each_answer(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: dict[str, str] = {}

    class SlowBallot:
        poll_seconds = 0.02

        def write(self, name: str, text: str) -> str:
            clock.sleep(store_client.STORE_SECONDS)
            words.setdefault(name, text)
            return ""

        def read_all(self, names: list[str]) -> dict[str, str]:
            clock.sleep(store_client.STORE_SECONDS)
            return {name: words[name] for name in names if name in words}

        def close(self) -> None:
            pass

    monkeypatch.setattr(agreement, "StoreBallot", SlowBallot)
    monkeypatch.setattr(agreement, "spans_nodes", lambda: True)
    stood, why = stand(clock, tmp_path, step_seconds=1000.0, committed=True)
    assert why.startswith(f"only 1 of {WORLD} ranks came to step {AT}")
    assert 100 < stood <= 120


def test_a_store_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packets are dropped, torch itself waits for minutes."""
    monkeypatch.setattr(store_client, "STORE_SECONDS", 0.05)
    released = threading.Event()
    with pytest.raises(StoreLost, match=r"no answer in 0\.05 s"):
        store_client.call_in_time(lambda: released.wait(60))
    released.set()
