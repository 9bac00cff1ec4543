"""Starting the daemon: once for all ranks, detached from the trainer's terminal, in a directory of Sentinel's own."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel import wire
from sentinel.daemon.signal_handlers import HELD_BACK
from sentinel.errors import ConfigError
from sentinel.hooks.transport import daemon_launcher, detach
from sentinel.hooks.transport.daemon_launcher import LIMIT, PERIOD_SECONDS, DaemonLauncher, DaemonLocator
from sentinel.node import locks, paths

WORDS = """
import os, sys, time
print(os.getpid(), os.getsid(0), os.isatty(1), sys.stdin.read() == "", flush=True)
time.sleep(60)
"""
SLEEPER = [sys.executable, "-S", "-c", WORDS]


@pytest.fixture
def directory(private_places: Path) -> Iterator[Path]:
    path = paths.run_directory("r1")
    yield path
    log = path / paths.LOG
    assert not log.exists() or stat.S_IMODE(log.stat().st_mode) == 0o600


def kill(directory: Path, which: int = 1) -> None:
    """Kill the daemon of the `which`th start, once it has logged its pid."""
    pid = pids(directory, which)[which - 1]
    os.kill(pid, signal.SIGKILL)
    gone(pid)


def pids(directory: Path, starts: int = 1) -> list[int]:
    return [int(line.split()[0]) for line in until(directory / paths.LOG, starts).splitlines()]


def gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [], 10)
        os.close(descriptor)


def launch_of(starter: DaemonLauncher) -> Any:
    """Return the start that is under way, or else the last one; None: there was none."""
    return starter._launch


def ended(starter: DaemonLauncher) -> None:
    """Wait until the daemon of the last start has ended."""
    assert launch_of(starter) is not None
    select.select([launch_of(starter)._status_pipe], [], [], 10)
    for _ in range(2000):
        if not launch_of(starter).running:
            return
        time.sleep(0.005)  # its descriptors close before it ends
    raise AssertionError("it runs on")


def until(path: Path, lines: int) -> str:
    for _ in range(2000):
        if path.exists() and (text := path.read_text()).count("\n") >= lines:
            return text
        time.sleep(0.005)  # another process writes it: there is no event to wait for
    raise AssertionError(f"{path} has not {lines} lines")


def test_the_daemon_is_detached_from_the_trainer(directory: Path) -> None:
    """The daemon has its own session, empty stdin and its own log: it must not hold the trainer's pipe open."""
    starter = DaemonLauncher(directory, SLEEPER)
    starter.start()
    _, session, terminal, empty = until(directory / paths.LOG, 1).split()
    assert (int(session) != os.getsid(0), terminal, empty) == (True, "False", "True")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    starter.close()
    kill(directory)


def test_the_daemon_is_not_a_child_of_the_process_it_serves(directory: Path) -> None:
    """A script that waits for all its children, or a harness that counts them, does not meet the daemon."""
    starter = DaemonLauncher(directory, SLEEPER)
    starter.start()
    (pid,) = pids(directory)
    between = parent(pid)
    assert os.getpid() not in (between, parent(between))
    starter.record_service()
    gone(between)
    assert parent(pid) not in (between, os.getpid())
    assert not starter._running()
    kill(directory)
    starter.close()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_children_that_the_script_or_the_kernel_reaps(directory: Path) -> None:
    """A failed start is noticed though a handler of SIGCHLD, or with SIG_IGN the kernel, reaps every child."""
    starter = DaemonLauncher(directory, ["/bin/sh", "-c", "echo port is taken; exit 4"])
    taken = []
    for handler in (lambda *_: taken.append(os.waitpid(-1, os.WNOHANG)), signal.SIG_IGN, signal.SIG_DFL):
        former = signal.signal(signal.SIGCHLD, handler)
        try:
            assert starter.failure() is None
            starter.start()
            ended(starter)
        finally:
            signal.signal(signal.SIGCHLD, former)
    assert (
        starter.failure()
        == f"the daemon ended 3 times (status 4): port is taken; its log is {directory / 'daemon.log'}"
    )
    assert len(taken) == 1
    starter.close()


def test_the_users_children_are_left_to_the_user(directory: Path) -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "exit 7"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    starter = DaemonLauncher(directory, SLEEPER)
    starter.start()
    kill(directory)
    ended(starter)
    assert child.wait() == 7
    starter.close()


def test_signals_wait_until_they_can_be_served(directory: Path) -> None:
    held = "import signal; print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))"
    starter = DaemonLauncher(directory, [sys.executable, "-S", "-c", held])
    starter.start()
    assert until(directory / paths.LOG, 1) == f"{sorted(map(int, HELD_BACK))}\n"
    assert detach.HELD_BACK == HELD_BACK
    ended(starter)
    starter.close()


def test_process_1_keeps_the_daemon_as_its_child(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 inherits every orphan in any case, and must then reap it."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    starter = DaemonLauncher(directory, SLEEPER)
    starter.start()
    (pid,) = pids(directory)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    starter.record_service()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    starter.record_loss()
    starter.start()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    last = pids(directory, 2)[-1]
    os.kill(last, signal.SIGKILL)
    ended(starter)
    assert launch_of(starter) is not None
    assert launch_of(starter).status == "-9"
    starter.close()


def test_ranks_start_only_one_daemon(directory: Path) -> None:
    first, second = DaemonLauncher(directory, SLEEPER), DaemonLauncher(directory, SLEEPER)
    first.start()
    second.start()
    first.start()
    assert launch_of(first) is not None
    assert launch_of(second) is None
    assert second.failure() is None
    # Once the first daemon has served and is gone, any rank may start the next one.
    first.record_service()
    second.start()
    assert launch_of(second) is not None
    pids(directory, 2)
    kill(directory, 1)
    kill(directory, 2)
    first.close()
    second.close()


def test_a_daemon_that_cannot_start_is_given_up_with_a_message(directory: Path) -> None:
    starter = DaemonLauncher(directory, ["/bin/sh", "-c", "echo first; echo port is taken; kill -9 $$"])
    for _ in range(LIMIT):
        assert starter.failure() is None
        starter.start()
        ended(starter)
    failure = starter.failure()
    assert failure == f"the daemon ended 3 times (status -9): port is taken; its log is {directory / paths.LOG}"
    last = launch_of(starter)
    starter.start()
    assert launch_of(starter) is last
    starter.close()


def test_a_directory_of_another_user_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.parent.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, not to you \(12345\)"):
        DaemonLauncher(directory, SLEEPER)


def died(starter: DaemonLauncher, directory: Path, which: int = 1) -> None:
    """Record that the daemon of the `which`th start served, kill it, and record its loss."""
    starter.record_service()
    kill(directory, which)
    starter.record_loss()


def test_a_daemon_that_served_is_started_again_without_end_with_growing_pauses(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("sentinel.hooks.transport.daemon_launcher.time.monotonic", lambda: now[0])
    starter, pauses = DaemonLauncher(directory, SLEEPER), []
    for which in range(1, 11):
        begin, before = now[0], launch_of(starter)
        while launch_of(starter) is before:
            starter.start()
            now[0] += 0.5
        pauses.append(now[0] - begin - 0.5)
        assert starter.failure() is None
        died(starter, directory, which)
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    now[0] += PERIOD_SECONDS
    starter.start()
    died(starter, directory, 11)
    assert starter._rests_until() == now[0], "a long time ago is forgotten"
    before = launch_of(starter)
    starter.record_service()
    starter.record_loss()
    starter.start(at_once=True)
    assert launch_of(starter) is not before, "the end of a run does not wait"
    kill(directory, 12)
    starter.close()


def test_the_last_rank_removes_what_a_killed_daemon_left(directory: Path) -> None:
    first, second = DaemonLauncher(directory, SLEEPER), DaemonLauncher(directory, SLEEPER)
    first.start()
    until(directory / paths.LOG, 1)
    died(first, directory)
    first.close()
    assert directory.exists(), "another rank is there"
    second.close()
    assert not directory.exists()


def test_a_directory_that_a_daemon_removed_is_made_again(directory: Path) -> None:
    starter = DaemonLauncher(directory, SLEEPER)
    locks.remove(directory)
    starter.start()
    assert until(directory / paths.LOG, 1)
    died(starter, directory)
    assert locks.sweep(paths.runtime_root()) == [], "the run lives there, though its daemon was killed"
    starter.close()


def test_a_directory_that_a_daemon_removes_at_this_moment_is_made_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter, hold = DaemonLauncher(directory, SLEEPER), locks.hold

    def too_late(*place: Any) -> int | None:
        monkeypatch.setattr(locks, "hold", hold)
        locks.remove(directory)
        return hold(*place)

    monkeypatch.setattr(locks, "hold", too_late)
    starter.start()
    assert launch_of(starter) is None
    starter.start()
    assert until(directory / paths.LOG, 1)
    starter.close()
    kill(directory)


def test_a_daemon_is_looked_for_every_few_seconds_however_long_there_is_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, tries = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), [0.0]

    def exhausted(_: Path) -> None:
        tries.append(clock.now)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(daemon_launcher, "time", clock)
    monkeypatch.setattr(daemon_launcher, "DaemonConnection", exhausted)
    locator = DaemonLocator(tmp_path / "daemon.sock")
    while clock.now < 600:
        assert locator.dial(wire.Identity(run="r", run_id="r", session="s")) is None
        clock.now += 0.1
    assert max(later - earlier for earlier, later in pairwise([*tries, 600.0])) < 10
    assert len(tries) < 150, "and not at every turn"
