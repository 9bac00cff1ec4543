"""Faults while alerts are being delivered: kill -9, receivers away for an hour, a clock that is set back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.config.settings import Duration, Grouping
from sentinel.notify import DELIVERED, Delivery, Message, Route
from sentinel.notify.entry import LONGEST_PAUSE, Entry
from sentinel.notify.limiter import Limiter
from sentinel.notify.outbox import Outbox, row
from sentinel.notify.pipeline import Pipeline
from tests.notify.cases import case
from tests.notify.killed import ALERTS
from tests.notify.vendors import ROUTING_KEY, PagerDuty, serving

KILLS = 102
"""Number of children. Two of them are not killed: the last one of each phase."""
GROUPING = Grouping(wait=Duration(5), interval=Duration(60), repeat=Duration(4 * 3600))


@pytest.mark.slow
@pytest.mark.processes
def test_kill_9_at_100_random_points_loses_none_and_repeats_only_what_was_not_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_KEY", ROUTING_KEY)
    chance, server = random.Random(5), PagerDuty()
    with serving(server):
        command = [sys.executable, "-m", "tests.notify.killed", str(history(tmp_path / "r1.sqlite")), server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as zygote:
            assert zygote.stdin is not None
            assert zygote.stdout is not None
            killed = 0
            for generation in range(10 * KILLS):
                phase = "firing" if killed < KILLS // 2 else "resolved"
                last = killed in (KILLS // 2 - 1, KILLS - 1)  # the last child of a phase is not killed
                zygote.stdin.write(f"{generation} {phase}\n")
                zygote.stdin.flush()
                child = int(zygote.stdout.readline())
                if not last:
                    wanted = server.taken.qsize() + chance.randrange(4)
                    deadline = time.monotonic() + 0.2  # it may have ended by then
                    while server.taken.qsize() < wanted and time.monotonic() < deadline:
                        time.sleep(0.0005)
                    time.sleep(chance.uniform(0.0, 0.008))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                status = int(zygote.stdout.readline())
                assert status in (0, -signal.SIGKILL)
                killed += last or status == -signal.SIGKILL
                if killed == KILLS:
                    break
            zygote.stdin.close()
    taken = server.all()
    assert server.refused == []
    assert server.open == set()
    assert {event["dedup_key"] for event in taken} == set(server.triggered)
    assert len(set(server.triggered)) == ALERTS
    check_repeats(taken)


def check_repeats(taken: list[dict[str, Any]]) -> None:
    """Check that a repeated event was the last of a killed child, which could not mark it as sent."""
    by_child: dict[str, list[tuple[str, str]]] = {}
    for event in taken:
        by_child.setdefault(event["path"].split("/")[1], []).append((event["event_action"], event["dedup_key"]))
    seen: dict[tuple[str, str], bool] = {}
    for told in by_child.values():
        assert len(told) == len(set(told))
        for one in told:
            assert seen.get(one, True), f"{one} was marked, and is sent again"
        seen |= dict.fromkeys(told[:-1], False) | {told[-1]: True}
    assert len(taken) <= 2 * ALERTS + KILLS


def history(path: Path) -> Path:
    """Create a database as the history's writer does: without a write-ahead log each commit would wait for the disk."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
    return path


class LeapingLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while there is nothing to do, and then jumps to the next thing to do."""

    def __init__(self) -> None:
        super().__init__()
        self._leapt = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def leap(timeout: float | None = None) -> Any:
            found = select(timeout if timeout is None else 0)
            if not found and timeout:
                self._leapt += timeout
            return found

        self._selector.select = leap  # type: ignore[attr-defined]

    def time(self) -> float:
        return super().time() + self._leapt


class Away:
    """A receiver that fails with `fault` until the time `back`, and then takes everything."""

    def __init__(self, fault: Callable[[], Delivery] | None, back: float, clock: Callable[[], float]) -> None:
        self._fault, self._back, self._clock = fault, back, clock
        self.got: list[Message] = []
        self.tries = 0

    async def deliver(self, message: Message) -> Delivery:
        self.tries += 1
        if self._clock() < self._back:
            if self._fault is None:
                await asyncio.Event().wait()
            assert self._fault is not None
            return self._fault()
        self.got.append(message)
        return DELIVERED

    async def close(self) -> None:
        pass


@pytest.mark.slow
def test_receivers_that_are_away_for_an_hour_are_told_what_is_true_when_they_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 alerts in that hour, of which every second ends within it; the daemon is restarted in the middle."""
    began, path = 1e9, history(tmp_path / "r1.sqlite")

    async def here(function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)  # a thread would not know that time leaps

    async def scenario() -> None:
        zero = asyncio.get_running_loop().time()

        def clock() -> float:
            return began + asyncio.get_running_loop().time() - zero

        faults: dict[str, Callable[[], Delivery] | None] = {
            "refuses": lambda: Delivery(fault="connection", detail="connection refused", retry=True),
            "hangs": None,
            "breaks": lambda: Delivery(fault="server error", detail="it answers 500", retry=True),
            "limits": lambda: Delivery(fault="rate limited", detail="it answers 429", retry=True, after=120.0),
        }
        away = {name: Away(fault, began + 3600, clock) for name, fault in faults.items()}

        def pipeline() -> Pipeline:
            routes = [Route(name, one, lambda _: True, 10.0, GROUPING, Limiter()) for name, one in away.items()]
            made = Pipeline("train", "r1", routes, outbox=Outbox(path), clock=clock)
            made.start()
            return made

        cases = [case(f"0.{number}", alert=f"Rule{number}") for number in range(60)]
        running = pipeline()
        for number, one in enumerate(cases):
            running.put(one)
            await asyncio.sleep(59)
            if number % 2:
                one.state, one.resolved_step, one.resolved_time = "resolved", 500, clock()
                running.put(one)
            if number == 30:
                assert running.pending == 4 * 31
                await running.close()
                running = pipeline()
                for known in cases[: number + 1]:
                    running.put(known)
        assert all(not one.got for one in away.values())
        await asyncio.sleep(began + 3600 - clock() + 1.5 * LONGEST_PAUSE)
        for name, one in away.items():
            assert sorted(message.alert for message in one.got) == sorted(f"Rule{n}" for n in range(60)), name
            assert {m.alert: m.firing for m in one.got} == {f"Rule{n}": n % 2 == 0 for n in range(60)}, name
            assert one.tries < 60 * 25, name
        assert running.pending == 0
        await running.close()

    loop = LeapingLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_a_clock_that_was_set_back_a_day_delays_no_message(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    now = [1e9]

    def pipeline(fake: Away) -> Pipeline:
        made = Pipeline(
            "train",
            "r1",
            [Route("ops", fake, lambda _: True, 10.0, GROUPING, Limiter())],
            outbox=Outbox(path),
            clock=lambda: now[0],
        )
        made.start()
        return made

    async def turn(made: Pipeline, to: Away, seconds: float) -> None:
        """Let `seconds` pass, until the receiver is tried again."""
        tries = to.tries
        now[0] += seconds
        made.put(case("9.9", alert="Nudge"))
        while to.tries == tries:  # noqa: ASYNC110 (a task of the pipeline's own)
            await asyncio.sleep(0.002)

    async def scenario() -> None:
        refuses = Away(lambda: Delivery(fault="connection", detail="", retry=True), 1e12, lambda: now[0])
        first = pipeline(refuses)
        first.put(case())
        for _ in range(5):
            await turn(first, refuses, 400)
        await first.close()
        assert refuses.tries >= 5
        now[0] -= 86_400
        back = Away(None, 0.0, lambda: now[0])
        second = pipeline(back)
        second.put(case())
        await turn(second, back, LONGEST_PAUSE)
        while "LossSpike" not in {message.alert for message in back.got}:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await second.close()

    asyncio.run(scenario())


def test_former_names_of_states_in_the_outbox_are_read(tmp_path: Path) -> None:
    box = Outbox(tmp_path / "r1.sqlite")
    box.write([row(Entry(receiver="ops", alert="LossSpike", cases={"0.1": case(state="rolled back")}), 0.0)])
    box.close()
    (kept,) = Outbox(tmp_path / "r1.sqlite").entries()
    assert [one.state for one in kept.cases.values()] == ["rolled_back"]


def test_an_outbox_whose_file_was_replaced_is_written_again_in_whole(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    box = Outbox(path)
    box.write([("ops", "LossSpike", b"1"), ("ops", "Hang", b"2")])
    path.rename(tmp_path / "aside")
    sqlite3.connect(path).close()
    path.touch()
    box.write([("ops", "MemoryCreep", b"3")])
    assert box.trouble == ""
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT alert FROM outbox").fetchall() == [("Hang",), ("LossSpike",), ("MemoryCreep",)]
