"""Finds the daemon of a run, or starts one if none serves: once for all ranks of a node, in the background.

Its stdin is empty and its output its own log: an inherited stderr would keep `train.py | cat` open as long as the
daemon lives. It is not our child (`detach.py`): `os.wait()` in the user's script would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import is_passing
from sentinel.hooks.transport import connection
from sentinel.hooks.transport.connection import DaemonConnection, Recorder
from sentinel.node import locks, paths

LAUNCH_SECONDS = 1.0
"""Time for `detach.py` to fork. It usually takes 20 ms; a slower one is reaped later."""
LIMIT = 3
"""Consecutive starts without an answer after which the daemon counts as broken and is not started again."""
PAUSE_SECONDS = 20.0
"""Time between two starts: a daemon that needs longer than this to open its socket will not come."""
PERIOD_SECONDS = 600.0
"""Period over which deaths of daemons that had served are counted."""
LONGEST_REST = 60.0
"""Longest pause in seconds before a daemon that had served is started again.

The first such death is followed by an immediate start, the second by one after a second, the third after two: restarts
slow down, whatever keeps killing the daemon.
"""
_DETACHED = str(Path(__file__).with_name("detach.py"))


class DaemonLauncher:
    """Keeps a daemon serving in `directory`. Used on the sender's thread only."""

    def __init__(self, directory: Path, command: Sequence[str] | None = None, *, settings: Path | None = None) -> None:
        """`settings`: the file that the daemon reads, instead of the one in force.

        Raises ConfigError, with the fix, if the directory cannot be used.
        """
        self._directory = paths.private_directory(directory)
        self.socket = paths.socket_path(directory)
        daemon = [sys.executable, "-P", "-m", "sentinel", "daemon", "--directory", str(directory)]
        daemon += ["--config", str(settings)] if settings is not None else []
        self._command = command or [*daemon, "--started-by", str(os.getpid())]
        self._run = locks.hold(directory, locks.RUN, shared=True)
        self._lock: int | None = None
        self._launch: _Launch | None = None
        self._started = 0.0
        self._unanswered = 0
        self._deaths: deque[float] = deque(maxlen=32)
        self._serves = False
        self.has_served = False
        """Whether a daemon started here ever answered: if so, a start that fails is always tried again."""
        self._awaited = False
        """Whether a record waits for a daemon to come."""

    def start(self, *, at_once: bool = False) -> None:
        """Start the daemon, unless another rank is doing so, ours is still starting, or a pause is not over. Raises
        OSError.

        `at_once`: the run is at its end, and does not wait for the pause to be over.
        """
        now = time.monotonic()
        if self._running() and now < self._started + PAUSE_SECONDS:
            return
        if self._unanswered >= LIMIT and not self.has_served:
            return
        if now < self._rests_until() and not at_once:
            return
        try:
            if not self._take_lock():
                return
            log = self._log()
        except FileNotFoundError:  # a daemon that ended just then removed the directory: the next try makes it again
            self._let_go_of_the_lock()
            return
        launch = self._launch_daemon(log)
        if self._launch is not None:
            self._launch.forget()
        self._unanswered, self._started, self._launch = self._unanswered + 1, now, launch

    def record_service(self) -> None:
        """Note that a daemon serves: from now on any rank may start the next one."""
        self._unanswered, self._serves, self.has_served = 0, True, True
        if self._launch is not None:
            self._launch.let_go()
        self._let_go_of_the_lock()

    def record_loss(self) -> None:
        """Note that the connection broke. If the daemon had served, it died, or will soon be found alive."""
        if self._serves:
            self._serves = False
            self._deaths.append(time.monotonic())

    def failure(self) -> str | None:
        """Return why there is no daemon, in words; None as long as the last one started may still answer."""
        if self._unanswered < LIMIT or self._launch is None or self._running():
            return None
        return f"the daemon ended {LIMIT} times (status {self._launch.status}){self._last_words()}"

    def open_record(self, rank: int) -> Recorder:
        """Open a file for what a rank that ends now has not sent. Raises ConfigError if it cannot be written."""
        return Recorder(self._directory / f".{locks.EARLY}{rank}-{os.getpid()}")

    def publish_record(self, record: Recorder) -> None:
        """Let the daemon see a complete record. Raises OSError if the daemon removed the directory meanwhile."""
        record.path.rename(record.path.with_name(record.path.name.removeprefix(".")))
        self._awaited = True

    def close(self) -> None:
        """Release all. The daemon exits by itself after its run ended, and cleans up. A killed daemon cannot: we do it
        here."""
        comes = self._running()
        self.abandon()
        if not comes and not self._awaited:
            locks.clear(self._directory)

    def abandon(self) -> None:
        """Release all, in a forked child or at the end."""
        if self._launch is not None:
            self._launch.forget()
            self._launch = None
        self._let_go_of_the_lock()
        if self._run is not None:
            os.close(self._run)
            self._run = None

    def _rests_until(self) -> float:
        if self._unanswered >= LIMIT:
            return self._started + LONGEST_REST
        if not self._deaths:
            return 0.0
        recent = sum(self._deaths[-1] - death < PERIOD_SECONDS for death in self._deaths)
        return self._deaths[-1] + (min(2.0 ** (recent - 2), LONGEST_REST) if recent > 1 else 0.0)

    def _running(self) -> bool:
        return self._launch is not None and self._launch.running

    def _log(self) -> int:
        # mode 0600: what a run prints, and how it fails, is private to its user.
        return os.open(self._directory / paths.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _launch_daemon(self, log: int) -> _Launch:
        try:
            return _Launch(self._command, log)
        finally:
            os.close(log)

    def _take_lock(self) -> bool:
        if self._lock is None:
            paths.private_directory(self._directory)  # a daemon that ended removed it, if there were no other ranks
            if self._run is not None and not locks.is_at(self._run, self._directory / locks.RUN):
                os.close(self._run)  # its directory was removed: a sweep would take the current one for unused
                self._run = None
            if self._run is None:
                self._run = locks.hold(self._directory, locks.RUN, shared=True)
            self._lock = locks.hold(self._directory, locks.START)
        return self._lock is not None

    def _let_go_of_the_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _last_words(self) -> str:
        log = self._directory / paths.LOG
        try:
            lines = log.read_text(errors="replace").split("\n")
        except OSError:
            return f"; its log is {log}"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f": {last}; its log is {log}" if last else f"; its log is {log}"


class _Launch:
    """One start of the daemon, until the daemon serves or has ended."""

    def __init__(self, command: Sequence[str], log: int) -> None:
        """Start the command, detached. Raises OSError if it cannot be started."""
        self.status = ""
        """Exit status, once it is not `running`; negative: the signal that ended it."""
        # A process without a parent becomes a child of process 1: if that is us, it stays our child, as we must reap
        # it.
        detached = os.getpid() != 1
        self._status_pipe, theirs = os.pipe()
        os.set_blocking(self._status_pipe, False)
        detacher = [sys.executable, "-P", "-S", _DETACHED, str(theirs)] if detached else []
        try:
            self._child = subprocess.Popen(
                [*detacher, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(theirs,),
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        finally:
            os.close(theirs)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Wait by pid: the other children are the user's. The user's handler of SIGCHLD may have reaped ours
            # already.
            self._child.wait(LAUNCH_SECONDS if detached else 0.0)

    @property
    def running(self) -> bool:
        """Whether the program was started, and neither serves nor has ended yet."""
        child = self._child.poll()
        if self._status_pipe < 0:
            return False
        try:
            status = os.read(self._status_pipe, 64)
        except BlockingIOError:
            return True
        if status or child is not None:  # at its end, its descriptors close before it ends
            self.status = status.decode() or str(child)
            self._close()
        return self._status_pipe >= 0

    def let_go(self) -> None:
        """Stop waiting for the program: it serves, or is no longer needed."""
        if self._status_pipe >= 0:
            self._close()

    def forget(self) -> None:
        """Let the program run on, and no longer ask for its state."""
        self.let_go()
        if self._child.poll() is None:
            self._child.returncode = 0  # else Popen.__del__ warns of it

    def _close(self) -> None:
        os.close(self._status_pipe)
        self._status_pipe = -1


SHORTEST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts. A daemon that we started ourselves is tried after the shortest pause."""


class DaemonLocator:
    """Finds the daemon of a run, or has one started. Used on the sender's thread only."""

    def __init__(self, address: Path | None, settings: Path | None = None) -> None:
        """`address`: where a daemon serves, if the user said so. `settings`: the file for a daemon started here."""
        self._address, self._settings = address, settings
        self._launcher: DaemonLauncher | None = None
        self._pause = SHORTEST_PAUSE
        self._next = 0.0
        self._told: set[str] = set()

    def dial(self, identity: wire.Identity, *, last: bool = False) -> DaemonConnection | None:
        """Return a connection; None if there is none yet. Raises ConfigError or ProtocolError, with the reason, if none
        will come.

        `last`: the run is at its end, and there is no time for pauses.
        """
        now = time.monotonic()
        if now < self._next and not last:
            return None
        self._next = now + self._pause
        if record := os.environ.get("SENTINEL_RECORD"):
            return self._recording(connection.name_file(record, identity), identity)
        path = self._path(identity.run_id)
        try:
            return DaemonConnection(path)
        except OSError as error:
            if is_passing(error):
                self._rest(error)
            else:
                self._absent(path, error, last)
            return None

    def record_answer(self) -> None:
        """Note that the daemon answered: the next search begins with short pauses."""
        self._pause = SHORTEST_PAUSE
        if self._launcher is not None:
            self._launcher.record_service()

    def record_loss(self) -> None:
        """Note that the connection broke: the next attempt is made after a pause."""
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if self._launcher is not None:
            self._launcher.record_loss()

    def open_record(self, identity: wire.Identity) -> connection.Recorder | None:
        """Open a file for what the daemon has not taken by the end of this rank; None if the daemon is not ours."""
        return self._launcher.open_record(identity.rank) if self._launcher is not None else None

    def publish_record(self, record: connection.Recorder) -> None:
        """Let the daemon read a complete record."""
        if self._launcher is not None:
            self._launcher.publish_record(record)

    def close(self) -> None:
        """Release a daemon that we started; it ends by itself."""
        if self._launcher is not None:
            self._launcher.close()

    def abandon(self) -> None:
        """Close what belongs to the parent, in a forked child."""
        if self._launcher is not None:
            self._launcher.abandon()

    def _recording(self, path: Path, identity: wire.Identity) -> DaemonConnection:
        made = connection.Recorder(path)
        if identity.rank == 0:
            faults.say(f"recording to {made.path}; no daemon watches. Afterwards: sentinel replay {made.path}")
        return made

    def _path(self, run_id: str) -> Path:
        path = self._address or paths.address()
        if path is not None:
            if self._settings is not None:
                faults.say(f"config={self._settings} is not used: the daemon at {path} has settings of its own")
                self._settings = None
            return path
        if self._launcher is None:
            self._launcher = DaemonLauncher(paths.run_directory(run_id), settings=self._settings)
        return self._launcher.socket

    def _absent(self, path: Path, error: OSError, last: bool) -> None:
        if self._launcher is not None:
            try:
                self._launcher.start(at_once=last)
            except OSError as failed:
                if is_passing(failed):
                    self._rest(failed)
                    return
                raise ConfigError(f"the daemon cannot be started: {failed}") from None
            if (failure := self._launcher.failure()) is None:
                return
            if not self._launcher.has_served:
                raise ConfigError(failure)
            self._say_once(f"{failure}; training goes on, and it is started again every minute")
            return
        self._rest()
        self._say_once(f"no daemon serves at {path} ({error.strerror}); training goes on, and it is looked for again")

    def _rest(self, passing: OSError | None = None) -> None:
        """Lengthen the pause before the next attempt. `passing`: what the machine lacks for now."""
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._next = time.monotonic() + self._pause
        if passing is not None:
            self._say_once(f"no daemon for now ({passing.strerror}); training goes on, and it is looked for again")

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            faults.say(text)
