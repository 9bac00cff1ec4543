"""The course of a demo: training commands side by side, shown until all have ended."""

from __future__ import annotations

import abc
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sentinel.demo.display import Display, Row
from sentinel.demo.outcome import DemoOutcome
from sentinel.demo.trainee import SCRIPT, Trainee
from sentinel.errors import ConfigError, SentinelError
from sentinel.node import paths

POLL_SECONDS = 0.1
HISTORY_SECONDS = 15.0
"""Seconds for the daemon to finish writing its history after the end of its run."""


class DemoFailed(SentinelError):
    """Raised when a demo did not show what it should show."""


class Course(abc.ABC):
    """One demo. Use it as a context manager: at the exit it ends all processes that it started."""

    stall_seconds = 120.0
    """Seconds without a step of any run after which the demo fails. Importing torch from a cold disk takes less."""

    def __init__(self, fault: str, seed: int, steps: int, out: Path) -> None:
        self.fault, self.seed, self.steps, self.out = fault, seed, steps, out
        self.run_id = f"demo-{fault}-{secrets.token_hex(3)}"
        self.said: list[str] = []
        """Lines of the runs' stderr that were shown."""
        self.began = time.monotonic()
        self.trainees: list[Trainee] = []
        """The run whose output is shown, first, and the others."""
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
        # A second Ctrl-C would leave processes behind that have not been ended yet.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.endings.close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def launch(self, name: str, arguments: Sequence[str], environment: dict[str, str], script: Path = SCRIPT) -> None:
        """Start a script in the folder of that name."""
        self.launch_command(name, [sys.executable, str(script), *arguments], environment)

    def launch_command(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start a command in the folder of that name."""
        trainee = Trainee(self.out / name, command, environment)
        self.endings.callback(trainee.end)
        self.trainees.append(trainee)

    def follow(self, display: Display) -> None:
        """Show all runs until they end. Raises DemoFailed if one of them fails, or all stand still."""
        running, seen, since = True, 0, time.monotonic()
        while running:
            # This is checked before the files are read, so that the last output of a process is read, too.
            running = any(trainee.exit_code is None for trainee in self.trainees)
            for number, trainee in enumerate(self.trainees):
                for line in trainee.follow():
                    self.show(self.choose_line(number, line), display)
            display.progress(*self.rows())
            self.look(display)
            for trainee in self.trainees:
                if trainee.exit_code and (why := self.explain_death(trainee)):
                    raise DemoFailed(why)
            if (now := sum(trainee.step for trainee in self.trainees)) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.stall_seconds:
                raise DemoFailed(f"no training step in {self.stall_seconds:.0f} s; {self.keep_logs()}")
            time.sleep(POLL_SECONDS)

    def show(self, line: str | None, display: Display) -> None:
        """Show a line, and keep it for the page; None: do nothing."""
        if line is not None:
            self.said.append(line)
            display.show_line(line)

    def choose_line(self, number: int, line: str) -> str | None:
        """Return what to show of a line that a run printed on stderr; None: nothing."""
        return line if number == 0 else None

    @property
    @abc.abstractmethod
    def introduction(self) -> str:
        """What will happen, in words."""

    @property
    def code(self) -> list[str]:
        """Lines of the script or commands that make it happen, if they are worth showing."""
        return []

    language = "python"
    """Language of `code`."""

    @abc.abstractmethod
    def start(self) -> None:
        """Write the data, and launch all runs."""

    @abc.abstractmethod
    def rows(self) -> tuple[Row, ...]:
        """Return the present state of the runs."""

    @abc.abstractmethod
    def look(self, display: Display) -> None:
        """Check the runs; called several times a second while they run."""

    def explain_death(self, trainee: Trainee) -> str:
        """Return why a process that has ended with an error has failed; "" if it was meant to end so."""
        last = trainee.stderr_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no word on stderr"]
        return f"a run ended with exit code {trainee.exit_code}: {last[0]}; see {trainee.stderr_path}"

    def keep_logs(self) -> str:
        """Keep the logs of a failed demo, and return where they are, in words."""
        return f"what the runs said: {self.out}/*/stderr.txt"

    @abc.abstractmethod
    def conclude(self) -> DemoOutcome:
        """Return the outcome. Raises DemoFailed if Sentinel did not do what the demo should show."""


def find_history(run_id: str) -> Path | None:
    """Return the path of a run's history, once its daemon has ended; None if there is none."""
    daemon = paths.run_directory(run_id)
    deadline = time.monotonic() + HISTORY_SECONDS
    while daemon.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return next((path for path in paths.histories() if path.stem == run_id), None)
