"""The heartbeat in the user's process: it takes a signal and two files in memory, and gives them back."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.transport.heartbeat_writer import HeartbeatWriter
from sentinel.wire.heartbeat_page import BLANK, PAGE, SIGNAL, SIZE, STACKS, unpack_heartbeat
from tests.hooks.conftest import FakeDaemon
from tests.hooks.sessions import find_heartbeat_writer, find_session, is_signal_caught


def files_in_memory() -> list[str]:
    """Return the names of our open files in memory."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:  # the descriptor of this listing itself
            continue
    return sorted(name.split()[0].removeprefix("/memfd:") for name in found if name.startswith("/memfd:sentinel"))


_trains: list[object] = []
"""What was trained last: without a reference to it the run would end by itself within half a second."""


def trained(monitor_of: FakeDaemon, steps: int = 5) -> sentinel.Monitor:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _trains[:] = model, optimizer
    monitor = sentinel.attach(model, optimizer)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor_of.wait(lambda: len(monitor_of.series("loss")) == steps)
    return monitor


def test_detach_gives_back_the_signal_and_the_files(daemon: FakeDaemon) -> None:
    assert not is_signal_caught()
    monitor = trained(daemon)
    assert is_signal_caught()
    assert files_in_memory() == [PAGE, STACKS]
    sender = find_session(monitor).sender
    monitor.detach()
    daemon.ended()
    sender.join(60)  # on busy cores it may still be at it
    assert not is_signal_caught()
    assert files_in_memory() == []


def test_a_signal_that_is_the_users_stays_the_users(daemon: FakeDaemon) -> None:
    mine = lambda *_: None  # noqa: E731
    before = signal.signal(SIGNAL, mine)
    try:
        trained(daemon).detach()
        daemon.ended()
        assert signal.getsignal(SIGNAL) is mine
        assert is_signal_caught()
    finally:
        signal.signal(SIGNAL, before)


def test_a_signal_that_the_user_takes_later_stays_the_users(daemon: FakeDaemon) -> None:
    mine = lambda *_: None  # noqa: E731
    monitor = trained(daemon)
    before = signal.signal(SIGNAL, mine)
    try:
        assert find_heartbeat_writer(monitor).stacks.signal() == 0, "the daemon is told to keep off"
        monitor.detach()
        daemon.ended()
        assert is_signal_caught()
    finally:
        faulthandler.unregister(SIGNAL)
        signal.signal(SIGNAL, before)


def test_a_page_that_is_given_up_is_blank_and_closed_once() -> None:
    heartbeat_writer = HeartbeatWriter(StepAccumulator())
    heartbeat_writer.beat()
    daemons = os.dup(heartbeat_writer.page)
    assert unpack_heartbeat(os.pread(daemons, SIZE, 0)) is not None
    heartbeat_writer.close()
    assert os.pread(daemons, SIZE, 0) == BLANK
    mine = [os.memfd_create("mine") for _ in range(2)]
    assert heartbeat_writer.page in mine, "the number is free again"
    heartbeat_writer.close()
    assert [os.fstat(each).st_size for each in mine] == [0, 0]
    for each in (*mine, daemons):
        os.close(each)


def test_numbers_that_the_loop_logs_and_phases_are_signs_of_life() -> None:
    accumulator = StepAccumulator()
    seen = [accumulator.progress]
    for sign in (
        lambda: accumulator.record_logged("reward", 1.0),
        lambda: accumulator.phase("eval"),
        lambda: accumulator.phase(""),
    ):
        sign()
        seen.append(accumulator.progress)
    assert seen == sorted(set(seen))
    stranger = threading.Thread(target=accumulator.record_logged, args=("reward", 2.0))
    stranger.start()
    stranger.join()
    assert accumulator.progress == seen[-1], "another thread that logs says nothing of the one that trains"


@pytest.mark.faults
def test_a_fault_in_the_heartbeat_costs_the_heartbeat_alone(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, swallowed: list[str]
) -> None:
    def broken(_: HeartbeatWriter) -> None:
        raise RuntimeError("no heart")

    monkeypatch.setattr(HeartbeatWriter, "beat", broken)
    trained(daemon).detach()
    assert daemon.ended().reason == "detach"
    assert len([text for text in swallowed if "no heart" in text]) == 1
    assert not is_signal_caught()
    assert files_in_memory() == []


def test_without_files_in_memory_the_run_is_watched_all_the_same(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    trained(daemon).detach()
    assert daemon.ended().reason == "detach"
    assert "hangs (this system has no memfd)" in daemon.of(wire.Hello)[0].unseen


def test_a_forked_child_neither_beats_nor_answers_the_signal(daemon: FakeDaemon) -> None:
    monitor = trained(daemon)
    child = os.fork()
    if child == 0:
        os._exit(int(is_signal_caught()) + 2 * len(files_in_memory()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_signal_caught()
    monitor.detach()
    daemon.ended()


def note_call(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, and notes each call by its name."""
    return lambda *arguments, **more: (calls.append(name), function(*arguments, **more))[1]


def test_a_forked_child_comes_to_its_end_where_the_timer_takes_the_stacks(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end an interpreter waits for the timer's thread, which a forked child does not have."""
    monitor = trained(daemon)
    heartbeat_writer = find_heartbeat_writer(monitor)
    monkeypatch.setattr("sentinel.hooks.transport.heartbeat_writer.REWIND_SECONDS", 0.0)
    timer = list[str]()
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, note_call(timer, name, getattr(faulthandler, name)))
    heartbeat_writer.stacks.wind()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it would hang with the GIL held
        signal.alarm(20)
        faulthandler.cancel_dump_traceback_later()  # as the interpreter does at its end
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert timer == ["dump_traceback_later", "cancel_dump_traceback_later"]
    heartbeat_writer.stacks.wind()
    assert timer[2:] == ["dump_traceback_later"], "the parent's is wound again"
    monitor.detach()
    daemon.ended()


def test_what_was_closed_is_not_closed_again_in_a_forked_child(daemon: FakeDaemon) -> None:
    trained(daemon).detach()
    daemon.ended()
    mine = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # the numbers that became free are among them
    child = os.fork()
    if child == 0:
        os._exit(sum(not Path(f"/proc/self/fd/{descriptor}").exists() for descriptor in mine))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for descriptor in mine:
        os.close(descriptor)
