"""How often a daemon wakes up: once a second while all is well, and more often while something is open."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sentinel import rulebook, wire
from sentinel.config import Settings
from sentinel.daemon import app
from sentinel.daemon.app import CALM_SECONDS, TICK_SECONDS, Daemon
from sentinel.store import FLUSH_SECONDS
from tests.daemon.test_runs import batch, hello


def daemon(folder: Path, *, stay: bool = True) -> Daemon:
    return Daemon(folder, rulebook.load, Settings(), stay=stay)


class Connection:
    """As much of a connection as the daemon uses."""

    pid, uid, frames, nbytes = 0, 0, 1, 100

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None: ...


def pauses(served: Daemon, monkeypatch: pytest.MonkeyPatch, count: int) -> list[float]:
    """The next `count` pauses between two looks."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)
        if len(found) == count:
            raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(app, "asyncio", _Without(sleep))
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(served._look())
    return found


class _Without:
    """asyncio with another `sleep`, for one module."""

    def __init__(self, sleep: Any) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


def test_one_that_stays_and_serves_nobody_is_calm(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses(daemon(private_places), monkeypatch, 3) == [CALM_SECONDS] * 3
    assert pauses(daemon(private_places, stay=False), monkeypatch, 3) == [TICK_SECONDS] * 3, "it is to go soon"


def test_an_alert_that_is_open_is_looked_at_more_often(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def train() -> None:
        peer: Any = Connection()
        served.received(peer, hello(0, 1))
        served.received(peer, batch(list(range(5)), loss=[1.0] * 5))
        watches.extend(served._watches.values())

    served, watches = daemon(private_places), list[Any]()
    asyncio.run(train())
    (watch,) = watches
    assert pauses(served, monkeypatch, 2) == [CALM_SECONDS] * 2
    watch.message(watch.attempt.ranks[0], batch([5], loss=[math.nan]), 1.0)
    assert [case.alert for case in watch.cases.values()] == ["NonFiniteLoss"]
    assert pauses(served, monkeypatch, 2) == [TICK_SECONDS] * 2


def test_stacks_that_are_on_their_way_are_looked_for(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def train() -> None:
        served.received(peer, hello(0, 1))
        (watch,) = served._watches.values()
        watch.vigil.stacks.order(watch.attempt.ranks[0], now=0.0)
        assert watch.restless
        watch.tick(app.time.monotonic())
        assert not watch.restless, "they did not come"

    served, peer = daemon(private_places), Connection()
    asyncio.run(train())


def test_a_disk_that_does_not_answer_holds_no_look_up(private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, began, looked, answers = daemon(private_places, stay=False), list[float](), list[float](), asyncio.Event()
    clock = _Clock()

    async def flush() -> None:
        began.append(clock.now)
        await answers.wait()

    async def turns(count: int) -> None:
        for _ in range(count):
            clock.turn.set()
            for _ in range(8):
                await asyncio.sleep(0)

    async def run() -> None:
        looking = asyncio.create_task(served._look())
        await turns(12)
        answers.set()
        await turns(12)
        looking.cancel()

    monkeypatch.setattr(served, "_flush", flush)
    monkeypatch.setattr(served, "_tick", looked.append)
    monkeypatch.setattr(app, "time", clock)
    monkeypatch.setattr(app, "asyncio", _Without(clock.sleep))
    asyncio.run(run())
    assert looked == [number * TICK_SECONDS for number in range(1, 25)]
    assert began[0] == looked[0]
    assert began[1] > looked[11], "one at a time"
    assert all(later - before >= FLUSH_SECONDS for before, later in pairwise(began))
    assert len(began) >= 4


class _Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now, self.turn = 0.0, asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await self.turn.wait()
        self.turn.clear()
        self.now += seconds
