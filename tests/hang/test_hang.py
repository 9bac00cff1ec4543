"""Real training processes that make no progress: hangs are reported with their place, other processes are not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.cli.client import ask_daemons
from sentinel.daemon.ranks.exit_status import has_ended
from sentinel.node import paths
from sentinel.store import History
from tests.hang.processes import SOON, WAIT_SECONDS, ask
from tests.waiting import until
from tests.zygote import TRAINING, ForkedProcess, start_zygote

pytestmark = pytest.mark.processes

STALLING = Path(__file__).parent.parent / "programs" / "stalling.py"


class Run:
    """A stalling process."""

    def __init__(self, process: subprocess.Popen[str], run_id: str) -> None:
        self.process, self._run_id = process, run_id

    def ask(self, what: str) -> Any:
        return ask(self._run_id, what)

    def hang(self) -> dict[str, Any]:
        """Return the case of the hang, once it has its stacks."""

        def list_hangs() -> list[dict[str, Any]]:
            cases = [case for case in self.ask("incidents") if case["alert"] == "Hang"]
            return cases if cases and all(case["stacks"] for case in cases) else []

        (case,) = until(list_hangs, "the alert with the stacks")
        return dict(case)

    def stall(self) -> dict[str, Any]:
        """Return the rank's stall as status shows it; one of 0 s if a busy daemon does not answer in time."""
        runs = self.ask("status")["runs"]
        return dict(runs[0]["ranks"][0]["stall"]) if runs else {"seconds": 0.0, "quiet_seconds": 0.0, "kind": None}

    def end(self) -> str:
        """Let the process go on to its end; return what it printed on the way."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(WAIT_SECONDS) == 0
        return self.process.stdout.read()


def kept() -> list[dict[str, Any]]:
    """Return the incidents in the history."""
    with History(paths.histories()[0]) as history:
        return history.incidents()


@contextlib.contextmanager
def stalling(kind: str, folder: Path, rules: str = SOON) -> Iterator[Run]:
    """Run the program, and yield it once it stalls."""
    file = folder / "soon.yaml"
    file.write_text(rules)
    environment = {**os.environ, "SENTINEL_RUN_ID": f"h-{kind}", "SENTINEL_RULES": str(file)}
    command = [sys.executable, str(STALLING), kind]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ForkedProcess(command, zygote=start_zygote(TRAINING), env=environment, cwd="/", **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stalling\n"
            yield Run(process, f"h-{kind}")
        finally:
            process.kill()


@pytest.mark.sampled(1)
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
            until(lambda: run.stall()["kind"] == "holds the GIL", "the verdict")
        case = run.hang()
        if kind == "spin":  # each look finds it in or outside of `is_set`, which does not count as moving
            until(lambda: run.stall()["seconds"] > 8, "eight looks")
        assert len(run.ask("incidents")) == 1
    cause = case["diagnosis"]["cause"]
    assert f"{STALLING}:" in cause
    assert f"in {function}" in cause
    if kind in ("sleep", "lock", "loader"):
        assert words in cause
    assert f"in {function}" in case["stacks"]["0"]
    assert case["step"] >= 999 or kind == "gil"  # the held GIL leaves the last batches unsent


@pytest.mark.slow
def test_a_hang_is_over_when_progress_returns(private_places: Path) -> None:
    with stalling("sleep", private_places) as run:
        run.hang()
        run.end()
        [case] = until(lambda: [case for case in kept() if case["state"] == "resolved"], "the end")
        assert "sleep_in_user_code" in case["stacks"]["0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "outcome", "alerts"),
    [
        (signal.SIGTERM, "ended by SIGTERM", ["Hang"]),
        (signal.SIGKILL, "failed: rank 0 was ended by SIGKILL", ["Hang", "RankLost"]),
    ],
)
def test_a_hang_is_open_at_the_end_of_a_run_that_is_killed(
    private_places: Path, number: int, outcome: str, alerts: list[str]
) -> None:
    """A hang is not resolved because its process ended, and a run that was asked to end has not lost a rank."""
    with stalling("sleep", private_places) as run:
        run.hang()
        (daemon,) = ask_daemons("status")
        run.process.send_signal(number)
        until(lambda: has_ended(daemon["pid"]), "the end of the daemon, which writes its history last")
    (row,) = json.loads(CliRunner().invoke(cli, ["last", "--json"]).output)
    found = json.loads(CliRunner().invoke(cli, ["incidents", "--run", "h-sleep", "--json"]).output)
    assert [case["alert"] for case in found] == alerts
    assert {case["state"] for case in found} == {"unresolved"}
    assert (row["outcome"], row["open"]) == (outcome, len(alerts))
    assert row["began"] + row["seconds"] >= found[0]["time"], "it took until it was killed"


SLOW_CALL = "is in a checkpoint, a compiler, an export or other output"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_long_work_is_no_hang(private_places: Path) -> None:
    """Seven processes stall at the same time, as the test only lets time pass and needs no CPU."""
    slow = {kind: SLOW_CALL for kind in ("checkpoint", "future", "upload", "write", "program")}
    kinds = {"after": "", "phase": "", **slow}
    with contextlib.ExitStack() as stack:
        runs = {kind: stack.enter_context(stalling(kind, private_places, SOON.replace("> 3", "> 5"))) for kind in kinds}
        for kind, run in runs.items():
            until(lambda run=run: run.stall()["quiet_seconds"] > 8, f"three quiet seconds more than a hang's: {kind}")
            until(lambda run=run, kind=kind: run.stall()["kind"] == kinds[kind], f"the verdict: {kind}")
            assert run.stall()["seconds"] == 0, kind
            assert not run.ask("incidents"), kind
        for run in runs.values():
            run.end()


@pytest.mark.slow
def test_another_models_evaluation_is_no_hang(private_places: Path) -> None:
    """Looks at the stack, one each second, show that the process moves."""
    with stalling("evaluation", private_places, SOON.replace("> 3", "> 8")) as run:
        until(lambda: run.stall()["quiet_seconds"] > 11, "some quiet seconds more")
        until(lambda: run.stall()["kind"] == "does something else in the loop", "the verdict")
        assert not run.ask("incidents")
        run.end()


@pytest.mark.slow
def test_a_process_that_was_stopped_is_no_hang_then_or_later(private_places: Path) -> None:
    with stalling("sleep", private_places, SOON.replace("> 3", "> 6")) as run:
        run.process.send_signal(signal.SIGSTOP)
        until(lambda: run.stall()["quiet_seconds"] > 10, "ten quiet seconds")
        assert run.stall()["seconds"] == 0
        run.process.send_signal(signal.SIGCONT)
        until(lambda: 0 < run.stall()["seconds"] < 5, "a count that starts over")
        assert not run.ask("incidents")
        run.end()


@pytest.mark.slow
def test_a_phase_that_has_ended_is_not_counted(private_places: Path) -> None:
    with stalling("after-phase", private_places, SOON.replace("> 3", "> 6")) as run:
        until(lambda: 0 < run.stall()["seconds"] < 5, "a count that begins at the phase's end")
        assert not run.ask("incidents")
        run.end()


@pytest.mark.slow
def test_a_handler_of_the_users_is_not_called_and_the_stacks_come_by_message(private_places: Path) -> None:
    with stalling("own-handler", private_places) as run:
        assert "in sleep_in_user_code" in run.hang()["stacks"]["0"]
        assert run.end() == "done\n", "the handler would have said so"


@pytest.mark.slow
def test_a_case_is_shown_with_its_stacks(private_places: Path) -> None:
    with stalling("lock", private_places) as run:
        run.hang()
        shown = CliRunner().invoke(cli, ["incidents", "show", str(run.ask("incidents")[0]["id"])])
    assert shown.exit_code == 0
    assert re.search(r"stack of rank 0.*\n  > .*stalling.py:\d+  wait_for_a_lock\n", shown.output)
    assert "other threads" in shown.output
    assert "first sign" in shown.output
    assert "loss" not in shown.output
