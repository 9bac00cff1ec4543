"""Start the daemon of a run where none serves: once for all ranks of a node, in the background.

Its stdin is nothing and its output its own log: an inherited stderr would keep `train.py | cat` open as long as the
daemon lives.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sentinel import places

LIMIT = 3
PERIOD_SECONDS = 600.0
"""A daemon that needs more than `LIMIT` starts in this time is broken, and left alone."""
PAUSE_SECONDS = 20.0
"""Between two starts: a daemon that needs longer than this to open its socket is not coming."""


class Autostart:
    """Keeps trying that a daemon serves in `directory`. Used by the sender's thread alone."""

    def __init__(self, directory: Path, command: Sequence[str] | None = None) -> None:
        """Raises ConfigError where the directory cannot be had, with the mend."""
        self._directory = places.private_directory(directory)
        self.socket = places.socket_path(directory)
        daemon = [sys.executable, "-P", "-m", "sentinel", "daemon", "--directory", str(directory)]
        self._command = command or [*daemon, "--started-by", str(os.getpid())]
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts: list[float] = []

    def start(self) -> None:
        """Start it, unless another rank is doing that now, or ours is still on its way. Raises OSError."""
        now = time.monotonic()
        if self._running() and now < self._starts[-1] + PAUSE_SECONDS:
            return
        self._starts = [start for start in self._starts if now < start + PERIOD_SECONDS]
        if len(self._starts) < LIMIT and self._take_lock():
            self._starts.append(now)
            self._process = self._spawn()

    def served(self) -> None:
        """Somebody serves: from now on any rank may start the next one."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def failure(self) -> str | None:
        """Why there will be no daemon, in words; None as long as one may come."""
        if len(self._starts) < LIMIT or self._process is None or self._running():
            return None
        return f"the daemon ended {LIMIT} times (status {self._process.returncode}){self._last_words()}"

    def close(self) -> None:
        """Let go: the daemon ends by itself when its run has gone."""
        self.served()
        if self._process is not None and self._running():
            self._process.returncode = 0  # else Popen.__del__ warns of a process that runs on, which is what it is for
        self._process = None

    def _running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _spawn(self) -> subprocess.Popen[bytes]:
        # mode 0600: what a run prints and fails with is nobody else's business.
        log = os.open(self._directory / places.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
            )
        finally:
            os.close(log)

    def _take_lock(self) -> bool:
        if self._lock is not None:
            return True
        lock = os.open(self._directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _last_words(self) -> str:
        log = self._directory / places.LOG
        try:
            lines = log.read_text(errors="replace").split("\n")
        except OSError:
            return f"; its log is {log}"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}; its log is {log}" if last else f"; its log is {log}"
