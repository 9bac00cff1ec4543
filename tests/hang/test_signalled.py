"""Which stalled ranks are signalled for their stacks: the signal ends a process that does not handle it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from sentinel import wire
from sentinel.actions.stacks import StacksAction
from sentinel.runs import Rank, Run
from sentinel.wire.heartbeat_page import BEAT_SECONDS, SIGNAL, Heartbeat, Kind, Stall
from tests.run_parts import FakeIncidents, SentMessages

pytestmark = pytest.mark.skipif(not SIGNAL, reason="this system has no real-time signals")

HANDLES = f"import signal; signal.signal({SIGNAL}, lambda *_: None)"
PENDING = f"{HANDLES}; signal.pthread_sigmask(signal.SIG_BLOCK, [{SIGNAL}]); import os; os.kill(os.getpid(), {SIGNAL})"
HELD = Stall(seconds=60.0, limit=30.0, kind=Kind.HOLDING, quiet=60.0)


class RankProcesses(SentMessages):
    """The connections to ranks; keeps the processes that were signalled."""

    def __init__(self) -> None:
        super().__init__()
        self.signalled: list[int] = []

    def interrupt(self, process: int, signal: int) -> bool:
        self.signalled.append(process)
        return True


class DumpFile:
    """The file that a rank's stacks are dumped into."""

    def __init__(self, *, sealed: bool) -> None:
        self.descriptor = os.open(os.devnull, os.O_RDONLY) if sealed else os.memfd_create("stacks")

    def find_dump_file(self, number: int) -> int:
        return self.descriptor

    def ask_collectives(self, rank: Rank, now: float) -> None: ...


@contextmanager
def started(code: str) -> Iterator[int]:
    """Run code in a process, which then waits. Yields its pid once the code has run."""
    command = [sys.executable, "-c", f"{code}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(b"\n")


def make_rank() -> tuple[Run, Rank]:
    run = Run("train", "r1", 0.0)
    identity = wire.Identity(run="train", run_id="r1", session="s")
    return run, run.hello(wire.Hello(version="test", identity=identity), 0.0)[0]


def is_signalled(
    process: int, *, stall: Stall = HELD, beat: float = 0.0, number: int = SIGNAL, sealed: bool = False
) -> bool:
    """Order the stacks of a rank at second 60, after a last beat at `beat`; return whether its process is signalled.
    Where it is not, it is asked by a message."""
    run, rank = make_rank()
    page = Heartbeat(*[0] * len(Heartbeat._fields))._replace(beat=beat, signal=number)
    rank.process, rank.heartbeat, rank.stall = process, page, stall
    link, dump = RankProcesses(), DumpFile(sealed=sealed)
    StacksAction(run.attempt, link, FakeIncidents(), dump).order(rank, 60.0)
    os.close(dump.descriptor)
    assert link.signalled in ([], [process])
    assert bool(link.messages) != bool(link.signalled)
    return bool(link.signalled)


def test_a_rank_that_holds_the_gil_and_handles_the_signal_is_signalled() -> None:
    with started(HANDLES) as process:
        assert is_signalled(process)


@pytest.mark.parametrize("code", ["pass", f"import signal; signal.signal({SIGNAL}, signal.SIG_IGN)", PENDING])
def test_a_process_that_would_end_by_it_or_has_one_pending_is_not(code: str) -> None:
    with started(code) as process:
        assert not is_signalled(process)


def test_a_process_that_is_gone_is_not() -> None:
    with started("pass") as process:
        pass
    assert not is_signalled(process)


def test_a_rank_that_can_answer_or_whose_signal_is_the_users_is_not() -> None:
    with started(HANDLES) as process:
        assert not is_signalled(process, stall=HELD._replace(kind=Kind.BLOCKED))
        assert not is_signalled(process, beat=60.0 - BEAT_SECONDS)
        assert not is_signalled(process, number=0)
        assert not is_signalled(process, sealed=True)


def test_a_rank_that_does_not_answer_is_asked_again_after_longer_and_longer_pauses() -> None:
    run, rank = make_rank()
    link, dump = RankProcesses(), DumpFile(sealed=True)
    action = StacksAction(run.attempt, link, FakeIncidents(), dump)
    asked = []
    for second in range(600):
        before = len(link.messages)
        action.order(rank, float(second))
        asked += [second] * (len(link.messages) - before)
        action.tick(float(second))
    os.close(dump.descriptor)
    assert len(asked) == 4
    assert [after - before for before, after in pairwise(asked)] == sorted({b - a for a, b in pairwise(asked)})
