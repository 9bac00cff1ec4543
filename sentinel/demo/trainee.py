"""Starts one training command of the demo, follows it through the files it writes, and ends it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import sentinel.examples
from sentinel.demo.record import LossCurve
from sentinel.node import paths

SCRIPT = Path(next(iter(sentinel.examples.__path__))) / "train_gpt.py"
END_SECONDS = 5.0
"""Seconds for a process to end after SIGTERM."""


class Tail:
    """Reads the complete lines of a growing file."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path, self._read, self._pending = path, 0, b""

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        self._read += len(new)
        *complete, self._pending = (self._pending + new).split(b"\n")
        return [line.decode(errors="replace") for line in complete]


class Trainee:
    """A training command with a directory of its own. It gets one more argument, `--log FILE`."""

    def __init__(self, directory: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for stale in ("loss.jsonl", "stderr.txt", "stdout.txt", paths.LOG):
            (directory / stale).unlink(missing_ok=True)
        self.curve = LossCurve()
        self.stderr_path = directory / "stderr.txt"
        self._log, self._stderr = Tail(directory / "loss.jsonl"), Tail(self.stderr_path)
        whole = [*command, "--log", str(directory / "loss.jsonl")]
        with (directory / "stdout.txt").open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            # A session of its own: only the demo gets Ctrl-C, and ends its children in order.
            self._process = subprocess.Popen(
                whole, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
            )

    @property
    def step(self) -> int:
        """The last step that was logged; -1 before the first."""
        return self.curve.steps[-1] if self.curve.steps else -1

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def follow(self) -> list[str]:
        """Read the new lines of the command's log, and return those that it printed on stderr."""
        for line in self._log.lines():
            self.curve.add(line)
        return self._stderr.lines()

    def end(self) -> None:
        """End the command if it still runs. Returns once it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def environment(**changes: str) -> dict[str, str]:
    """Return our environment without what would change the demo, with one torch thread, and with `changes`."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | changes


_DROPPED = frozenset({"SENTINEL_DISABLED", "SENTINEL_RECORD", "SENTINEL_RUN", "SENTINEL_RUN_ID", "RANK", "WORLD_SIZE"})
