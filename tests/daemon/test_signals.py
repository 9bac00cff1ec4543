"""Signals that reach the daemon before it can serve them wait, and are served then."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sentinel import wire
from sentinel.daemon.signal_handlers import HELD_BACK
from sentinel.node import paths
from tests.daemon.simulated import SimulatedRank

pytestmark = pytest.mark.processes

EARLY = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {held})
os.kill(os.getpid(), {number})
os.execv(sys.executable, [sys.executable, "-m", "sentinel", "daemon", "--directory", {directory!r}, *sys.argv[1:]])
"""


def signalled(number: int, *options: str) -> subprocess.Popen[str]:
    """Start a daemon for which a signal waits at its first instruction: what starts it blocks signals until then."""
    directory = str(paths.run_directory("r1"))
    script = EARLY.format(held=[int(one) for one in HELD_BACK], number=int(number), directory=directory)
    return subprocess.Popen([sys.executable, "-S", "-c", script, *options], stderr=subprocess.PIPE, cwd="/", text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_is_terminated_while_it_starts_leaves_nothing(number: int) -> None:
    daemon = signalled(number)
    _, told = daemon.communicate(timeout=20)
    assert daemon.returncode == 0, told
    assert told.splitlines()[-1].endswith("done")
    assert list(paths.runtime_root().iterdir()) == []


@pytest.mark.slow
def test_a_reload_that_is_asked_for_while_it_starts_is_made() -> None:
    with signalled(signal.SIGHUP) as daemon:
        assert daemon.stderr is not None
        assert any("rules are read again" in line for line in daemon.stderr)
        with SimulatedRank(paths.socket_path(paths.run_directory("r1"))) as rank:
            rank.hello()
            rank.say(wire.Goodbye())
        daemon.stderr.read()
        assert daemon.wait(10) == 0


def test_signals_are_held_back_before_the_long_part_of_the_start() -> None:
    """A daemon that is started by a person or systemd holds its signals back by itself."""
    code = """
import signal, sys
from sentinel.cli.daemon import daemon
sys.modules["sentinel.config.settings"] = None
try:
    daemon.main(["--stay"], standalone_mode=False)
except ImportError:
    print(sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=20)
    assert done.stdout == f"{sorted(map(int, HELD_BACK))}\n", done.stderr
