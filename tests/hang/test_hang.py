"""Real training processes that make no progress: those that hang are told of, with the place; the others are not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import places
from sentinel.cli.client import asked
from sentinel.errors import ConfigError
from sentinel.store import History

pytestmark = pytest.mark.processes

STALLING = Path(__file__).parent.parent / "programs" / "stalling.py"
WAIT_SECONDS = 30.0
SOON = """
group: mine
rules:
  - {alert: Hang, scope: rank, expr: stalled_seconds > 3, severity: critical, actions: [evidence, stacks]}
"""


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return answer


class Run:
    """A stalling process."""

    def __init__(self, process: subprocess.Popen[str], run_id: str) -> None:
        self.process, self._run_id = process, run_id

    def ask(self, what: str) -> Any:
        try:
            return asked(places.socket_path(places.run_directory(self._run_id)), what)
        except ConfigError:
            return {"runs": []} if what == "status" else []

    def hang(self) -> dict[str, Any]:
        """The alert, once it is there with the stacks."""
        cases = until(lambda: [case for case in self.ask("incidents") if case["alert"] == "Hang"], "the alert")
        assert len(cases) == 1
        until(lambda: self.ask("incidents")[0]["stacks"], "the stacks")
        return dict(self.ask("incidents")[0])

    def stall(self) -> dict[str, Any]:
        """The rank's stall, as status has it."""
        runs = self.ask("status")["runs"]
        return dict(runs[0]["ranks"][0]["stall"]) if runs else {}

    def end(self) -> None:
        """Let it go on, to its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(WAIT_SECONDS) == 0


def kept() -> list[dict[str, Any]]:
    """The incidents in the history."""
    with History(places.histories()[0]) as history:
        return history.incidents()


@contextlib.contextmanager
def stalling(kind: str, folder: Path, rules: str = SOON) -> Iterator[Run]:
    """A run that stalls by now."""
    file = folder / "soon.yaml"
    file.write_text(rules)
    environment = {**os.environ, "SENTINEL_RUN_ID": f"h-{kind}", "SENTINEL_RULES": str(file)}
    command = [sys.executable, str(STALLING), kind]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd="/", **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stalling\n"
            yield Run(process, f"h-{kind}")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "function", "words"),
    [
        ("sleep", "sleep_in_user_code", "uses no processor"),
        ("lock", "wait_for_a_lock", "uses no processor"),
        ("spin", "spin", "computes without end"),
        ("gil", "hold_the_gil", "holds the GIL"),
        ("loader", "sleep_in_user_code", "waits for the dataset of a DataLoader"),
    ],
)
def test_a_hang_is_told_with_the_place_in_the_users_code(
    private_places: Path, kind: str, function: str, words: str
) -> None:
    with stalling(kind, private_places) as run:
        if kind == "gil":
            until(lambda: run.stall().get("kind") == "holds the GIL", "the verdict")
        case = run.hang()
    cause = case["diagnosis"]["cause"]
    assert f"{STALLING}:" in cause
    assert f"in {function}" in cause
    if kind in ("sleep", "lock", "loader"):
        assert words in cause
    assert f"in {function}" in case["stacks"]["0"]
    assert case["step"] > 700  # with the GIL held the last batch stays unsent


def test_a_hang_is_over_when_progress_returns(private_places: Path) -> None:
    with stalling("sleep", private_places) as run:
        run.hang()
        run.end()
        [case] = until(lambda: [case for case in kept() if case["state"] == "resolved"], "the end")
        assert "sleep_in_user_code" in case["stacks"]["0"]


def test_a_process_that_dies_hangs_no_more(private_places: Path) -> None:
    with stalling("sleep", private_places) as run:
        run.hang()
        run.process.kill()
        until(lambda: kept()[0]["state"] == "resolved", "the end")


@pytest.mark.parametrize(
    ("kind", "stall"),
    [
        ("after", ""),
        ("phase", ""),
        ("evaluation", "does something else in the loop"),
        ("checkpoint", "is in a checkpoint, a compiler or an export"),
        ("program", "is in a checkpoint, a compiler or an export"),
    ],
)
def test_what_takes_long_with_reason_is_no_hang(private_places: Path, kind: str, stall: str) -> None:
    # That another model moves is seen by looking at the stack again and again: ten seconds are ten looks.
    patient = SOON.replace("stalled_seconds > 3", "stalled_seconds > 10 and stall_limit_seconds < 7000")
    with stalling(kind, private_places, patient) as run:
        if stall:
            enough = 11 if kind == "evaluation" else 3
            until(lambda: (now := run.stall()) and now["seconds"] > enough and now["kind"] == stall, "the verdict")
            assert run.stall()["limit"] == 7200
        else:
            until(lambda: run.stall() and run.stall()["quiet_seconds"] > 5, "five quiet seconds")
            assert run.stall()["seconds"] == 0
        assert not [case for case in run.ask("incidents") if case["state"] == "firing"]
        run.end()


def test_a_process_that_is_stopped_is_no_hang(private_places: Path) -> None:
    with stalling("sleep", private_places, SOON.replace("> 3", "> 30")) as run:
        run.process.send_signal(signal.SIGSTOP)
        until(lambda: run.stall() and run.stall()["quiet_seconds"] > 8, "eight quiet seconds")
        assert run.stall()["seconds"] == 0
        run.process.send_signal(signal.SIGCONT)
        run.end()
