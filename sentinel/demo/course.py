"""The course of a demo: two training processes side by side, shown until both have ended."""

from __future__ import annotations

import abc
import contextlib
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from sentinel.demo.display import Display, Row
from sentinel.demo.outcome import DemoOutcome
from sentinel.demo.trainee import SCRIPT, Trainee
from sentinel.errors import ConfigError, SentinelError
from sentinel.node import paths

POLL_SECONDS = 0.1
STALL_SECONDS = 120.0
"""Without a step of either run. Importing torch from a cold disk takes long, but not this long."""
HISTORY_SECONDS = 15.0
"""How long the daemon may take to write its history out once its run has ended."""


class DemoFailed(SentinelError):
    """The demo did not show what it is there to show."""


class Course(abc.ABC):
    """One demo. Use as a context manager: leaving it ends both processes."""

    def __init__(self, fault: str, seed: int, steps: int, out: Path) -> None:
        self.fault, self.seed, self.steps, self.out = fault, seed, steps, out
        self.run_id = f"demo-{fault}-{secrets.token_hex(3)}"
        self.said: list[str] = []
        """What the first process printed on stderr."""
        self.began = time.monotonic()
        self.trainees: list[Trainee] = []
        """The one whose words are shown, and the one beside it."""
        self.endings = contextlib.ExitStack()

    def __enter__(self) -> Course:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self.start()
        except BaseException as error:
            self.endings.close()
            if isinstance(error, OSError):
                raise ConfigError(f"{error.filename or self.out}: {error.strerror}; name another --out") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.endings.close()

    def launch(self, name: str, arguments: Sequence[str], environment: dict[str, str], script: Path = SCRIPT) -> None:
        """Start a process in the folder of that name."""
        trainee = Trainee(self.out / name, arguments, environment, script)
        self.endings.callback(trainee.end)
        self.trainees.append(trainee)

    def follow(self, display: Display) -> None:
        """Show both runs until they end. Raises DemoFailed where one of them fails, or stands still."""
        running, seen, since = True, 0, time.monotonic()
        while running:
            # Looked at before the files are read: what a process wrote last is then read too.
            running = any(trainee.exit_code is None for trainee in self.trainees)
            first, other = self.trainees
            for line in first.follow():
                self.said.append(line)
                display.show_line(line)
            other.follow()
            display.progress(*self.rows())
            self.look(display)
            for trainee in self.trainees:
                if trainee.exit_code and (why := self.explain_death(trainee)):
                    raise DemoFailed(why)
            if (now := first.step + other.step) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                raise DemoFailed(f"no training step in {STALL_SECONDS:.0f} s; {self.keep_logs()}")
            time.sleep(POLL_SECONDS)

    @property
    @abc.abstractmethod
    def introduction(self) -> str:
        """What will happen."""

    @property
    def code(self) -> list[str]:
        """Lines of the script that make it happen, where they are worth showing."""
        return []

    @abc.abstractmethod
    def start(self) -> None:
        """Write the data, and launch both."""

    @abc.abstractmethod
    def rows(self) -> tuple[Row, Row]:
        """How the runs are now."""

    @abc.abstractmethod
    def look(self, display: Display) -> None:
        """Called several times a second while they run."""

    def explain_death(self, trainee: Trainee) -> str:
        """Why a process that has ended with an error has failed; empty where that is as it should be."""
        last = trainee.stderr_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no word on stderr"]
        return f"a run ended with exit code {trainee.exit_code}: {last[0]}; see {trainee.stderr_path}"

    def keep_logs(self) -> str:
        """Where to look when the demo fails."""
        return f"what the runs said: {self.out}/*/stderr.txt"

    @abc.abstractmethod
    def conclude(self) -> DemoOutcome:
        """The outcome. Raises DemoFailed if Sentinel did not do what the demo shows."""


def find_history(run_id: str) -> Path | None:
    """Where a run's history is, once its daemon has ended; None where there is none."""
    daemon = paths.run_directory(run_id)
    deadline = time.monotonic() + HISTORY_SECONDS
    while daemon.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return next((path for path in paths.histories() if path.stem == run_id), None)
