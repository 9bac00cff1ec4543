"""A run whose history another program has locked at its start is put off; the records of its ranks are kept so long."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.node import locks, paths
from sentinel.store import History, Store
from tests.daemon.simulated import daemon_process
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

IDENTITY = wire.Identity(run="train", run_id="r1", world_size=1, pid=1, session="s")
STEPS = wire.Batch(
    seqs=array("q", [0, 1]).tobytes(),
    times=array("d", [1e9, 1e9 + 1]).tobytes(),
    columns={"loss": wire.Column(array("d", [1.0, math.nan]).tobytes())},
)


@pytest.fixture
def path() -> Path:
    """Return the history of the run's former start."""
    path = paths.state_directory() / "runs" / "r1.sqlite"
    former = Store(path, run="train", run_id="r1")
    former.records.begin_attempt(0, msgspec.msgpack.encode({}))
    former.close()
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file locked against readers, as a tool does that copies it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


def await_put_off(process: subprocess.Popen[bytes]) -> None:
    """Wait for the line of the daemon's log about the run."""
    assert process.stderr is not None
    assert any(b"is put off" in line for line in process.stderr)


def has_alert(path: Path) -> bool:
    with contextlib.suppress(ConfigError), History(path) as history:
        return [case["alert"] for case in history.incidents()] == ["NonFiniteLoss"]
    return False


def test_the_record_of_a_rank_that_ended_early_is_sent_again(path: Path) -> None:
    """It was deleted, and its alert with it."""
    frames = wire.Hello(version="test", identity=IDENTITY, ended=True), STEPS, wire.Goodbye(next_seq=2)
    with daemon_process("--started-by", str(os.getpid())) as (socket, process):
        with locked(path):
            draft = socket.with_name("draft")
            draft.write_bytes(b"".join(map(wire.frame, frames)))
            draft.rename(socket.with_name(f"{locks.EARLY}0-1"))
            await_put_off(process)
        until(lambda: has_alert(path), "the alert")
