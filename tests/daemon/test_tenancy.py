"""Leftovers of killed processes are removed; what is in use, or was put there by users, is not touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sentinel.config.settings import Settings
from sentinel.daemon import app
from sentinel.daemon.app import ConfigFiles, Daemon
from sentinel.daemon.shutdown import DaemonShutdown
from sentinel.node import locks, paths


@pytest.fixture
def directory() -> Path:
    path = paths.private_directory(paths.run_directory("r1"))
    (path / paths.LOG).write_text("its last output")
    return path


def test_a_leftover_is_swept(directory: Path) -> None:
    assert locks.sweep(paths.runtime_root()) == [directory]
    assert list(paths.runtime_root().iterdir()) == []


@pytest.mark.parametrize("name", [locks.DAEMON, locks.RUN, locks.START])
def test_a_directory_in_use_is_left_alone(directory: Path, name: str) -> None:
    lock = locks.hold(directory, name, shared=name == locks.RUN)
    assert lock is not None
    assert locks.sweep(paths.runtime_root()) == []
    assert (directory / paths.LOG).exists()
    os.close(lock)
    assert locks.sweep(paths.runtime_root()) == [directory]


def test_ranks_share_and_a_daemon_is_alone(directory: Path) -> None:
    ranks = [locks.hold(directory, locks.RUN, shared=True) for _ in range(2)]
    assert None not in ranks
    daemon = locks.hold(directory, locks.DAEMON)
    assert daemon is not None
    assert locks.hold(directory, locks.DAEMON) is None


def test_the_lock_of_a_killed_process_is_free(directory: Path) -> None:
    code = f"""
from pathlib import Path
from sentinel.node import locks
import signal
locks.hold(Path({str(directory)!r}), locks.DAEMON)
print("held", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert not locks.clear(directory)
        process.kill()
    assert locks.clear(directory)


def test_a_run_of_ten_days_keeps_its_directory(directory: Path, tmp_path: Path) -> None:
    """On many clusters systemd-tmpfiles deletes files in /tmp that were not written to for that long.

    Without its locks, a living daemon would lose its socket to the next one.
    """
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed (Debian package: systemd)")
    held = locks.live(directory)
    assert held is not None
    names = sorted(os.listdir(directory))
    for path in [*directory.iterdir(), directory]:
        os.utime(path, (0, 0))
    (tmp_path / "tmp.conf").write_text(f"d {directory.parent} - - - mM:10d\n")
    subprocess.run(["systemd-tmpfiles", "--clean", str(tmp_path / "tmp.conf")], check=True)
    assert sorted(os.listdir(directory)) == names
    (directory / locks.DAEMON).unlink()
    assert locks.sweep(paths.runtime_root()) == []
    for lock in held:
        os.close(lock)
    assert locks.sweep(paths.runtime_root()) == [directory]


@pytest.mark.parametrize("why", ["a file of somebody's", "empty", "open to others", "a link"])
def test_a_directory_that_may_be_a_users_is_not_touched(directory: Path, why: str) -> None:
    """SENTINEL_RUNTIME may name any directory."""
    root = paths.runtime_root()
    if why == "a file of somebody's":
        (directory / "thesis.tex").write_text("")
    elif why == "empty":
        (directory / paths.LOG).unlink()
    elif why == "open to others":
        directory.chmod(0o755)
    else:
        directory.rename(root.parent / "elsewhere")
        directory.symlink_to(root.parent / "elsewhere")
    assert locks.sweep(root) == []
    assert directory.exists()


def test_a_directory_that_was_taken_away_is_not_locked_by_its_ghost(directory: Path) -> None:
    ghost = locks.hold(directory, locks.START)
    locks.remove(directory)
    paths.private_directory(directory)
    lock = locks.hold(directory, locks.START)
    assert ghost is not None
    assert lock is not None
    assert locks.hold(directory, locks.START) is None


def test_a_daemon_that_removed_its_directory_leaves_that_of_its_successor(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon removes its directory before it tells the last rank that all is kept, and ends a moment later."""
    made = list[DaemonShutdown]()

    class Noted(DaemonShutdown):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

    monkeypatch.setattr(app, "DaemonShutdown", Noted)
    Daemon(directory, ConfigFiles(None), Settings())
    (ending,) = made
    ending.vanish()
    assert not directory.exists()
    paths.private_directory(directory)
    lock = locks.hold(directory, locks.START)
    assert lock is not None
    ending.vanish()
    assert locks.is_at(lock, directory / locks.START)
    os.close(lock)
