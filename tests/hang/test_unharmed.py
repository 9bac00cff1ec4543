"""Collecting stacks must kill no process: the signal is only for a process all of whose threads stand still."""

from __future__ import annotations

import faulthandler
import linecache
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon.ranks.stalls import StallDetector
from sentinel.diagnose.standstill.stacks import threads
from sentinel.hooks.transport.heartbeat_writer import format_stacks
from sentinel.runs import Attempt
from sentinel.wire.heartbeat_page import BEAT_SECONDS, PAGE, SIGNAL, STACKS, Place, pack_heartbeat
from tests.daemon.test_stalls import BEAT, hello
from tests.run_parts import FakeIncidents


class Standing:
    """A rank in this process that stands still since second 100.0, and what the detector does about it."""

    def __init__(self, dumps: int) -> None:
        self.asked: list[str] = []
        self.signals = 0
        self.attempt = Attempt(0, 0.0)
        self.stalls = StallDetector(self.attempt, self, FakeIncidents())
        self._page, self._dumps = os.memfd_create(PAGE), os.dup(dumps)
        self.rank = self.attempt.hello(hello(0, world=1), 0.0)
        self.rank.process = os.getpid()
        self.stalls.add_rank(self.rank, [self._page, self._dumps])

    def send(self, rank: int, message: wire.Message) -> None:
        assert isinstance(message, wire.Ask)
        self.asked.append(message.what)

    def interrupt(self, process: int, number: int) -> bool:
        assert (process, number) == (os.getpid(), SIGNAL)
        self.signals += 1
        os.write(self._dumps, b"Thread 0x01 (most recent call first):\n")
        return True

    def looked_at(self, now: float, beat: float, place: Place = Place.LOOP) -> None:
        """Let the detector look at the moment `now`, with the rank's last beat at `beat`."""
        os.pwrite(self._page, pack_heartbeat(BEAT._replace(beat=beat, signal=SIGNAL, place=place)), 0)
        self.stalls.tick(now)
        self.stalls.stacks.tick(now)


@pytest.fixture
def standing() -> Iterator[Standing]:
    dumps = os.memfd_create(STACKS)
    faulthandler.register(SIGNAL, file=dumps, all_threads=True)
    made = Standing(dumps)
    yield made
    made.stalls.close()
    faulthandler.unregister(SIGNAL)
    os.close(dumps)


def test_a_process_that_still_runs_python_is_asked_and_not_signalled(standing: Standing) -> None:
    for now in range(100, 130):
        standing.looked_at(float(now), beat=now - 0.1)
    assert "stacks" in standing.asked
    assert standing.signals == 0


def test_a_process_in_a_debugger_is_not_signalled_even_for_a_survey(standing: Standing) -> None:
    standing.looked_at(110.0, beat=100.0, place=Place.DEBUGGER)
    standing.stalls.survey(110.0)
    assert standing.asked == ["stacks"]
    for now in range(111, 130):
        standing.looked_at(float(now), beat=100.0, place=Place.DEBUGGER)
    assert standing.signals == 0


def test_a_process_that_holds_the_gil_is_signalled_once_and_has_its_dump(standing: Standing) -> None:
    for now in range(100, 101 + int(BEAT_SECONDS)):
        standing.looked_at(float(now), beat=100.0)
        assert standing.signals == 0
    for now in range(101 + int(BEAT_SECONDS), 130):
        standing.looked_at(float(now), beat=100.0)
    assert standing.signals == 1
    assert standing.rank.dump.startswith("Thread 0x01")


def test_a_process_that_was_asked_and_then_took_the_gil_is_signalled(standing: Standing) -> None:
    for now in range(100, 107):
        standing.looked_at(float(now), beat=now - 0.1)
    assert (standing.asked.count("stacks"), standing.signals) == (1, 0)
    for now in range(107, 114):
        standing.looked_at(float(now), beat=106.9)
    assert standing.signals == 1


def test_stacks_are_written_without_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*_: object) -> None:
        raise AssertionError("the file system may be what hangs")

    for name in ("getline", "getlines", "checkcache", "updatecache"):
        monkeypatch.setattr(linecache, name, unread)
    standing, stop = threading.Event(), threading.Event()

    def wait_here() -> None:
        standing.set()
        stop.wait()

    thread = threading.Thread(target=wait_here, name="waiter")
    thread.start()
    standing.wait()
    text = format_stacks()
    stop.set()
    thread.join()
    (found,) = (each for each in threads(text) if each.name == "waiter")
    assert ("wait_here", str(Path(__file__))) in [(frame.function, frame.file) for frame in found.frames]
