"""Starting the daemon: once for all ranks, apart from the trainer's terminal, in a directory that is ours."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel import places, tenancy
from sentinel.errors import ConfigError
from sentinel.hooks.autostart import LIMIT, PERIOD_SECONDS, Autostart

WORDS = """
import os, sys, time
print(os.getsid(0) == os.getpid(), os.isatty(1), sys.stdin.read() == "", flush=True)
time.sleep(60)
"""
SLEEPER = [sys.executable, "-S", "-c", WORDS]


@pytest.fixture
def directory(private_places: Path) -> Iterator[Path]:
    path = places.run_directory("r1")
    yield path
    log = path / places.LOG
    assert not log.exists() or stat.S_IMODE(log.stat().st_mode) == 0o600


def finish(starter: Autostart) -> None:
    process = starter._process
    assert process is not None
    starter.close()
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)


def until(path: Path, lines: int) -> str:
    for _ in range(2000):
        if path.exists() and (text := path.read_text()).count("\n") >= lines:
            return text
        time.sleep(0.005)  # another process writes it: there is no event to wait for
    raise AssertionError(f"{path} has not {lines} lines")


def test_it_stands_on_its_own(directory: Path) -> None:
    """A session of its own, stdin empty, output in its own log: it must not hold the trainer's pipe open."""
    starter = Autostart(directory, SLEEPER)
    starter.start()
    assert until(directory / places.LOG, 1) == "True False True\n"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finish(starter)


def test_ranks_start_only_one(directory: Path) -> None:
    first, second = Autostart(directory, SLEEPER), Autostart(directory, SLEEPER)
    first.start()
    second.start()
    first.start()
    assert first._process is not None
    assert second._process is None
    assert second.failure() is None
    # Once the first is known to serve, the next one, when it is gone, may be started by any rank.
    first.served()
    second.start()
    assert second._process is not None
    finish(first)
    finish(second)


def test_it_gives_up_in_words(directory: Path) -> None:
    starter = Autostart(directory, ["/bin/sh", "-c", "echo first; echo port is taken; exit 4"])
    for _ in range(LIMIT):
        assert starter.failure() is None
        starter.start()
        assert starter._process is not None
        starter._process.wait()
    failure = starter.failure()
    assert failure == f"the daemon ended 3 times (status 4): port is taken; its log is {directory / places.LOG}"
    last = starter._process
    starter.start()
    assert starter._process is last


def test_a_directory_of_somebody_else_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.parent.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, not to you \(12345\)"):
        Autostart(directory, SLEEPER)


def died(starter: Autostart) -> None:
    """It had served, and is killed."""
    starter.served()
    process = starter._process
    assert process is not None
    process.kill()
    process.wait()
    starter.lost()


def test_a_daemon_that_served_is_started_again_for_ever_with_growing_pauses(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("sentinel.hooks.autostart.time.monotonic", lambda: now[0])
    starter, pauses = Autostart(directory, SLEEPER), []
    for _ in range(10):
        begin, before = now[0], starter._process
        while starter._process is before:
            starter.start()
            now[0] += 0.5
        pauses.append(now[0] - begin - 0.5)
        assert starter.failure() is None
        died(starter)
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    now[0] += PERIOD_SECONDS
    starter.start()
    died(starter)
    assert starter._rests_until() == now[0], "a long time ago is forgotten"
    before = starter._process
    died(starter)
    starter.start(at_once=True)
    assert starter._process is not before, "the end of a run does not wait"
    starter.close()


def test_the_last_to_go_takes_away_what_a_killed_daemon_left(directory: Path) -> None:
    first, second = Autostart(directory, SLEEPER), Autostart(directory, SLEEPER)
    first.start()
    until(directory / places.LOG, 1)
    died(first)
    first.close()
    assert directory.exists(), "another rank is there"
    second.close()
    assert not directory.exists()


def test_a_directory_that_a_daemon_took_with_it_is_made_again(directory: Path) -> None:
    starter = Autostart(directory, SLEEPER)
    tenancy.remove(directory)
    starter.start()
    assert until(directory / places.LOG, 1)
    finish(starter)
