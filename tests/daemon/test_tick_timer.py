"""How often a daemon examines all runs: once a second while all is well, more often while something is open."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sentinel import wire
from sentinel.config.settings import Settings
from sentinel.daemon import app
from sentinel.daemon.app import ConfigFiles, Daemon
from sentinel.daemon.ingest.acknowledgements import Acknowledgements
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.daemon.shutdown import DaemonShutdown
from sentinel.daemon.tick_timer import CALM_SECONDS, GRACE_SECONDS, OPEN_SECONDS, READ_SECONDS, TickTimer
from sentinel.store import FLUSH_SECONDS
from tests.daemon.test_runs import batch, hello


class Served(Daemon):
    """A daemon, with what it gives to its timer and to the part that writes histories."""

    look: Callable[[float], None]
    restless: Callable[[], bool]
    watches: Mapping[str, WatchedRun]

    def __init__(
        self, folder: Path, *, stay: bool = True, afterwards: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """`afterwards`: runs after each round of writing, in place of the daemon's own."""

        def make_timer(look: Callable[[float], None], restless: Callable[[], bool]) -> TickTimer:
            self.look, self.restless = look, restless
            return TickTimer(look, restless)

        def make_acknowledgements(watches: Any, ranks: Any, own: Any) -> Acknowledgements:
            self.watches = watches
            return Acknowledgements(watches, ranks, afterwards or own)

        with pytest.MonkeyPatch.context() as noting:
            noting.setattr(app, "TickTimer", make_timer)
            noting.setattr(app, "Acknowledgements", make_acknowledgements)
            super().__init__(folder, ConfigFiles(None), Settings(), stay=stay)


class Connection:
    """The part of a connection that the daemon uses."""

    pid, uid, frames, nbytes = 0, 0, 1, 100

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)

    def take_process(self) -> int:
        return -1

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None: ...


class Timers:
    """An event loop in which only the requested timers exist, and the test calls them."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.live: list[Any] = []

    def call_later(self, seconds: float, call: Any) -> Any:
        timer = SimpleNamespace(call=call, cancel=lambda: self.live.remove(timer))
        self.asked.append(seconds)
        self.live.append(timer)
        return timer


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr("sentinel.daemon.tick_timer.asyncio", SimpleNamespace(get_running_loop=lambda: made))
    return made


def test_a_batch_that_comes_in_time_takes_the_place_of_the_timer(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    monkeypatch.setattr("sentinel.daemon.tick_timer.time", SimpleNamespace(monotonic=lambda: 0.0))
    timer = TickTimer(looked.append, lambda: False)
    timer.tick_if_due(0.0)
    assert looked == [], "it has not begun"
    timer.start()
    batches = 0.5, 0.995, 1.5, 1.999, 2.4, 2.998  # a second apart, or a little less, with urgent ones in between
    for now in batches:
        timer.tick_if_due(now)
    assert looked == [0.0, 0.995, 1.999, 2.998]
    assert len(timers.live) == 1, "and the timer never came to it"
    timer.stop()
    timer.tick_if_due(9.0)
    assert looked[-1] == 2.998
    assert timers.live == []


def test_the_timer_examines_runs_where_no_batch_comes(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, open_ = list[float](), False
    monkeypatch.setattr("sentinel.daemon.tick_timer.time", SimpleNamespace(monotonic=lambda: float(len(looked))))
    timer = TickTimer(looked.append, lambda: open_)
    timer.start()
    timers.live[0].call()
    open_ = True
    timers.live[0].call()
    assert looked == [0.0, 1.0, 2.0]
    assert timers.asked == [CALM_SECONDS + GRACE_SECONDS] * 2 + [OPEN_SECONDS]


def test_after_a_stop_what_came_meanwhile_is_read_first(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ranks that promised a rollback in time would be reported as not having answered."""
    now, looked = 100.0, list[float]()
    monkeypatch.setattr("sentinel.daemon.tick_timer.time", SimpleNamespace(monotonic=lambda: now))
    timer = TickTimer(looked.append, lambda: True)
    timer.start()
    now = 130.0
    timer.tick_if_due(now)  # the first of many messages
    timer.tick_if_due(now)
    assert looked == [100.0]
    assert timers.asked[-1] == READ_SECONDS
    now += READ_SECONDS
    timers.live[0].call()
    assert looked == [100.0, now]
    timer.tick_if_due(now + 1.0)
    assert looked[-1] == now + 1.0
    assert len(timers.live) == 1


def test_an_examination_that_fails_is_not_the_last(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: float) -> None:
        raise RuntimeError

    timer = TickTimer(fail, lambda: False)
    timer.start()
    timers.live[0].call()
    assert len(timers.live) == 1


def test_a_daemon_that_stays_without_runs_is_calm(private_places: Path) -> None:
    assert not Served(private_places).restless()
    assert Served(private_places, stay=False).restless(), "it is to go soon"


def test_runs_are_examined_more_often_while_an_alert_is_open(private_places: Path) -> None:
    async def train() -> None:
        await served.handle_message(peer, hello(0, 1))
        await served.handle_message(peer, batch(list(range(5)), loss=[1.0] * 5))
        assert not served.restless()
        await served.handle_message(peer, batch([5], loss=[math.nan]))
        (watch,) = served.watches.values()
        assert [case.alert for case in watch.incidents.log.cases.values()] == ["NonFiniteLoss"]
        assert served.restless()

    served, peer = Served(private_places), cast(Any, Connection())
    asyncio.run(train())


def test_runs_are_examined_more_often_while_stacks_are_awaited(private_places: Path) -> None:
    async def train() -> None:
        await served.handle_message(peer, hello(0, 1))
        (watch,) = served.watches.values()
        watch.ingest.stalls.stacks.order(watch.run.attempt.ranks[0], now=0.0)
        assert watch.restless
        watch.tick(app.time.monotonic())
        assert not watch.restless, "they did not come"

    served, peer = Served(private_places), cast(Any, Connection())
    asyncio.run(train())


def test_a_disk_that_does_not_answer_delays_no_examination(
    private_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ticks, answers = list[float](), list[float](), asyncio.Event()

    async def flush() -> None:
        began.append(ticks[-1])
        await answers.wait()

    async def looks(*times: float) -> None:
        for now in times:
            served.look(now)
            for _ in range(4):
                await asyncio.sleep(0)

    async def run() -> None:
        await looks(1.0, 2.0, 3.0, 9.0)
        answers.set()
        for _ in range(4):
            await asyncio.sleep(0)
        await looks(11.0, 11.0 + FLUSH_SECONDS / 2, 11.0 + FLUSH_SECONDS)

    monkeypatch.setattr(DaemonShutdown, "tick", lambda _, now: ticks.append(now))
    served = Served(private_places, afterwards=flush)
    asyncio.run(run())
    assert len(ticks) == 7
    assert began == [1.0, 11.0, 11.0 + FLUSH_SECONDS], "one at a time, and not too often"
