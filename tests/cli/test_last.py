"""`sentinel last`: how runs ended, from their histories and from the daemons that watch them."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.cli import last as command
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.runs.steps import RunStep
from sentinel.store import Store

DAY = 86400.0


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["last", *arguments])


def listed(*arguments: str) -> list[dict[str, Any]]:
    rows = json.loads(invoked(*arguments, "--json").stdout)
    assert isinstance(rows, list)
    return rows


def keep(
    name: str,
    *events: tuple[str, dict[str, Any]],
    severities: tuple[str, ...] = (),
    state: str = "resolved",
    cause: str = "",
    parents: dict[int, str] | None = None,
    run_id: str = "",
    node: int | None = None,
    of_job: tuple[str, ...] = (),
) -> Store:
    """Write the history of a run with one rank, of 20 steps from step 100 on."""
    run_id = run_id or f"{name}-1"
    store = Store(paths.state_directory() / "runs" / f"{run_id}.sqlite", run=name, run_id=run_id, node=node)
    store.records.begin_attempt(0, msgspec.msgpack.encode({"step_offset": 100}))
    store.records.add_rank(0, 0, process=7, hello=b"")
    store.records.add_event(0, 0, "hello", rank=0, pid=7)
    for seq in range(20):
        store.records.add_step(0, RunStep(seq, time.time(), {0: {}}, {"loss": 20.0 - seq}))
    for kind, detail in events:
        store.records.add_event(0, detail.pop("seq", 19), kind, **detail)
    for number, severity in enumerate(severities, 1):
        case = {"id": f"0.{number}", "run": name, "run_id": f"{name}-1", "alert": f"Alert{number}", "time": time.time()}
        case |= {"severity": severity, "state": state, "step": 104 + number, "first_step": 104, "summary": "it is so"}
        alert = {"alert": "RankLost"} if cause else {}
        alert |= {"parent": (parents or {}).get(number, "")}
        store.records.put_incident(f"0.{number}", 4, case | alert | {"diagnosis": {"cause": cause}})
    for own in of_job:
        case = {"id": "j.1", "run_id": run_id, "alert": "Alert1", "severity": "warning", "state": "resolved"}
        case |= {"time": time.time(), "step": 105, "first_step": 104, "summary": "it is so", "own": [own]}
        store.records.put_job_incident("j.1", 4, case)
    store.records.end_attempt(0)
    store.close(10.0)
    return store


BYE = ("goodbye", {"rank": 0, "reason": "exit"})
LEFT_OUT = (
    "end wanted",
    {"signal": 15, "why": "left out by --allow-shrink: the job goes on with nodes 0, 2", "left_out": True},
)
ENDED_BY_RUN = ("end wanted", {"signal": int(signal.SIGTERM), "why": "Hang: rank 0 is in a sleep"})


@pytest.mark.parametrize(
    ("events", "cause", "state", "words"),
    [
        ([BYE], "", "ended", "ended"),
        (
            [("goodbye", {"rank": 0, "reason": "exception", "detail": "ValueError: bad"})],
            "",
            "failed",
            "failed: ValueError: bad",
        ),
        ([("goodbye", {"rank": 0, "reason": "stopped", "detail": "no"})], "", "stopped", "stopped by Sentinel: no"),
        (
            [("lost", {"rank": 0, "reason": ""})],
            "rank 0 was ended by SIGKILL",
            "failed",
            "failed: rank 0 was ended by SIGKILL",
        ),
        (
            [("end wanted", {"signal": int(signal.SIGTERM)}), ("lost", {"rank": 0, "reason": ""})],
            "",
            "ended",
            "ended by SIGTERM",
        ),
        ([], "", "unknown", "not known: its history lacks its end"),
        ([BYE, ("hello", {"rank": 0, "pid": 8})], "", "unknown", "not known: its history lacks its end"),
        ([BYE, ("command ended", {"status": 0})], "", "ended", "ended"),
        ([BYE, ("command ended", {"status": 3})], "", "failed", "failed (exit status 3)"),
        ([BYE, ("process ended", {"rank": 0, "status": 3})], "", "failed", "failed (exit status 3)"),
        (
            [("goodbye", {"rank": 0, "reason": "stopped", "detail": "no"}), ("command ended", {"status": 85})],
            "",
            "stopped",
            "stopped by Sentinel: no (exit status 85)",
        ),
        (
            [("lost", {"rank": 0, "reason": ""}), ("process ended", {"rank": 0, "status": -11})],
            "",
            "failed",
            "failed: its connection was lost (killed by SIGSEGV)",
        ),
        (
            [("lost", {"rank": 0, "reason": ""}), ("process ended", {"rank": 0, "status": -9})],
            "rank 0 was ended by SIGKILL",
            "failed",
            "failed: rank 0 was ended by SIGKILL",
        ),
        (
            [("command ended", {"status": 1})],
            "",
            "unknown",
            "not known: its history lacks its end (exit status 1)",
        ),
        (
            [("end wanted", {"signal": int(signal.SIGTERM)}), BYE, ("command ended", {"status": -15})],
            "",
            "ended",
            "ended by SIGTERM",
        ),
        (
            [ENDED_BY_RUN, ("lost", {"rank": 0, "reason": ""}), ("process ended", {"rank": 0, "status": -15})],
            "",
            "failed",
            "ended by sentinel run: Hang: rank 0 is in a sleep",
        ),
        (
            [LEFT_OUT, ("lost", {"rank": 0, "reason": ""}), ("process ended", {"rank": 0, "status": -15})],
            "",
            "stopped",
            "left out by --allow-shrink: the job goes on with nodes 0, 2",
        ),
        (
            [("goodbye", {"rank": 0, "reason": "exception", "detail": "ValueError: bad"}), ENDED_BY_RUN],
            "",
            "failed",
            "failed: ValueError: bad",
        ),
        (
            [("goodbye", {"rank": 0, "reason": "exception", "detail": "KeyboardInterrupt"})],
            "",
            "ended",
            "ended by KeyboardInterrupt",
        ),
        (
            [
                ("end wanted", {"signal": 0, "why": "its command ended (killed by SIGKILL)"}),
                ("lost", {"rank": 0, "reason": ""}),
                ("command ended", {"status": -9}),
            ],
            "rank 0 was ended by SIGTERM",
            "failed",
            "ended by sentinel run: its command ended (killed by SIGKILL)",
        ),
    ],
)
def test_how_a_run_ended(events: list[tuple[str, dict[str, Any]]], cause: str, state: str, words: str) -> None:
    keep("train", *events, severities=("critical",) if cause else (), cause=cause)
    (row,) = listed()
    assert (row["state"], row["outcome"]) == (state, words)
    assert row["status"] == next((detail["status"] for _, detail in reversed(events) if "status" in detail), None)
    assert (row["step"], row["loss"], row["attempts"]) == (119, 1.0, 1)


def test_the_worst_runs_come_first() -> None:
    for name, severities, state in (
        ("healthy", (), ""),
        ("noisy", ("warning", "info"), "resolved"),
        ("over", ("critical",), "resolved"),
        ("open", ("warning", "critical"), "firing"),
        ("open_warning", ("warning",), "firing"),
    ):
        keep(name, BYE, severities=severities, state=state)
    keep("broken", ("goodbye", {"rank": 0, "reason": "exception", "detail": "E"}))
    rows = listed()
    assert [row["run"] for row in rows] == ["open", "broken", "over", "open_warning", "noisy", "healthy"]
    assert rows[0]["incidents"] == {"warning": 1, "critical": 1}
    assert rows[0]["worst"] == {
        "id": "0.2", "alert": "Alert2", "severity": "critical", "state": "unresolved", "step": 106,
            "grew": False,
    }  # fmt: skip
    head, first, *_, end = invoked().output.splitlines()
    assert head.split()[:3] == ["run", "started", "took"]
    assert first.endswith("1 critical (Alert2 at step 106), 1 warning")
    assert end == "6 runs; of one: sentinel last RUN"


def test_a_critical_consequence_counts_for_the_problem_that_it_follows_from() -> None:
    keep("train", BYE, severities=("warning", "critical"), parents={2: "0.1"})
    (row,) = listed()
    assert row["worst"] == {
        "id": "0.1", "alert": "Alert1", "severity": "critical", "state": "resolved", "step": 105,
        "grew": True,
    }  # fmt: skip
    assert invoked("train").output.splitlines()[0].count("1 critical (begun by Alert1 at step 105), 1 warning") == 1


def test_one_run_with_its_incidents() -> None:
    keep("train", ("snapshot on disk", {"seq": 10}), BYE, severities=("warning",))
    keep("other", BYE)
    closing, _, incident = invoked("train").output.splitlines()
    assert "run 'train' ended at step 119 in " in closing
    assert closing.endswith(": 1 warning (Alert1 at step 105); newest snapshot on disk: step 110; loss 1")
    assert incident.split()[:2] == ["train-1", "0.1"]
    assert " Alert1 " in incident
    (row,) = listed("train-1")
    assert [case["alert"] for case in row["cases"]] == ["Alert1"]
    unknown = invoked("nobody")
    assert unknown.exception is not None
    assert "no run is called nobody; there are: " in str(unknown.exception)


def test_whose_incidents_they_are_in_a_job_over_nodes() -> None:
    """A node that is not the coordinator has only its own: "no incidents" was read as of the job."""
    keep("calm", BYE, node=1)
    keep("own", BYE, severities=("critical",), node=1)
    keep("led", BYE, severities=("warning",), node=0, of_job=("0.1",))
    assert ": no incidents on node 1; loss" in invoked("calm").stdout
    assert ": 1 critical (Alert1 at step 105) on node 1; loss" in invoked("own").stdout
    assert ": 1 warning (Alert1 at step 105); loss" in invoked("led").stdout
    assert {row["run"]: row["node"] for row in listed()} == {"calm": 1, "own": 1, "led": None}


def test_a_snapshot_that_a_rollback_made_void_is_not_named() -> None:
    rolled_back = {"ok": True, "to": 5, "at": 15}
    keep("train", ("snapshot on disk", {"seq": 10}), ("rollback", rolled_back), BYE)
    assert listed()[0]["snapshot"] is None


def test_older_runs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep("train", BYE).path
    later = time.time() + 3 * DAY
    monkeypatch.setattr(command.time, "time", lambda: later)
    monkeypatch.setattr(command, "_yesterday", lambda: later - DAY)
    assert invoked().output == "No run since yesterday.\n"
    assert invoked("--since", "1h").output == "No run in the last 1 h.\n"
    assert invoked("--since", "7d").output.startswith("run ")
    assert "run 'train' ended" in invoked("train").output
    assert path.exists()


def test_no_runs_are_a_sentence() -> None:
    done = invoked()
    assert (done.exit_code, done.output) == (0, "No run since yesterday.\n")


def test_a_damaged_history_is_reported_and_the_others_are_listed() -> None:
    keep("train", BYE)
    (paths.state_directory() / "runs" / "junk.sqlite").write_bytes(b"junk" * 1000)
    done = invoked()
    assert done.exit_code == 1
    assert "junk.sqlite" in done.stderr
    assert done.stdout.splitlines()[1].startswith("train-1 ")


def damaged_run(run_id: str) -> Path:
    """Write the history of a run `train`, and damage it so that nothing can be read of it."""
    path = keep("train", BYE, run_id=run_id).path
    path.write_bytes(b"junk" * 1000)
    return path


@pytest.mark.parametrize("run", ["1234", "12"])
def test_of_a_run_whose_history_is_damaged_the_file_is_named_and_stays(run: str) -> None:
    path, others = damaged_run("1234"), keep("other", BYE).path
    done = invoked(run)
    said, known, to_do = done.stderr.removeprefix("sentinel: 12 is taken for 1234\n").splitlines()
    assert (done.exit_code, done.stdout) == (1, "")
    assert said.startswith("sentinel: 1234: the history of this run is damaged, and its outcome not known. ")
    assert said.endswith(f"{path}: not a history that can be read (file is not a database)")
    assert known.startswith("  known   the file has 4 kB, last written 20")
    assert to_do.startswith("  to do   restore the file from a backup, ")
    assert json.loads(invoked(run, "--json").stdout) == []
    assert (path.read_bytes(), others.exists()) == (b"junk" * 1000, True)


@pytest.mark.parametrize("run", ["1234", "12", "train"])
def test_what_can_be_read_of_a_damaged_history_is_shown(run: str) -> None:
    path = keep("train", BYE, run_id="1234", severities=("warning",)).path
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE incidents SET body = x'81a2'")
    done = invoked(run)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{path}: the history is damaged (" in done.stderr
    assert "  known   its name is train, it began 20" in done.stderr
    assert ", step 119 is kept, the file has " in done.stderr
    assert "its steps may be readable: sentinel history export 1234." in done.stderr


@pytest.mark.parametrize("run", ["1234", "12"])
def test_a_run_whose_history_is_damaged_is_not_said_to_have_no_incidents(run: str) -> None:
    path = damaged_run("1234")
    failed = CliRunner().invoke(cli, ["incidents", "--run", run])
    assert isinstance(failed.exception, ConfigError)
    assert str(failed.exception) == f"{path}: not a history that can be read (file is not a database)"
    assert "No incidents" not in failed.output


def test_a_history_that_was_moved_aside_is_named() -> None:
    path = damaged_run("1234")
    aside = path.rename(f"{path}.damaged-20261126")
    assert f" {aside}: not a history that can be read" in invoked("1234").stderr


def test_a_run_that_may_be_in_a_damaged_history_is_not_only_unknown() -> None:
    path = damaged_run("1234")
    keep("other", BYE)
    unknown = invoked("train").exception
    assert str(unknown).startswith("no run is called train; there are: other. It may be one that cannot be read: ")
    assert str(path) in str(unknown)


@pytest.mark.parametrize(("rank", "words"), [("live", "running"), ("stalled", "stalled for 1 min 12 s")])
def test_a_live_run_is_as_its_daemon_says(rank: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("train")
    said = {"run": "train", "run_id": "train-1", "step": 140, "values": {"loss": 0.5}}
    said["ranks"] = [{"state": rank, "stall": {"seconds": 72.0}}]
    monkeypatch.setattr(command, "list_runs", lambda: [said])
    (row,) = listed()
    assert (row["outcome"], row["step"], row["loss"]) == (words, 140, 0.5)
    assert f"run 'train' is {words}, at step 140, for " in invoked("train").output


def test_a_live_run_lasts_since_it_began_though_its_history_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(paths.state_directory() / "runs" / "train-1.sqlite", run="train", run_id="train-1")
    said = {"run": "train", "run_id": "train-1", "step": 140, "values": {"loss": 0.5}, "began": time.time() - 65.0}
    said["ranks"] = [{"state": "live", "stall": {"seconds": 0.0}}]
    monkeypatch.setattr(command, "list_runs", lambda: [said])
    (row,) = listed()
    assert row["began"] == said["began"]
    assert "run 'train' is running, at step 140, for 1 min " in invoked("train").output
    store.close()


def test_steps_that_the_history_lacks_are_counted() -> None:
    keep("train", ("history gap", {"seconds": 9.0, "dropped": {"steps": 1583, "layers": 40}}), BYE)
    lacks = "no incidents; its history lacks up to 1,583 steps"
    assert invoked().output.splitlines()[1].endswith(lacks)
    assert f": {lacks}; loss 1\n" in invoked("train").output


def test_a_run_is_over_though_its_daemon_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    keep("train", BYE, severities=("warning",), state="firing")
    said = {"run": "train", "run_id": "train-1", "step": 119, "values": {}, "ranks": [{"state": "gone"}]}
    monkeypatch.setattr(command, "list_runs", lambda: [said])
    (row,) = listed()
    assert (row["state"], row["outcome"], row["worst"]["state"]) == ("ended", "ended", "unresolved")
    assert "run 'train' ended at step 119 in " in invoked("train").output


@pytest.mark.parametrize("columns", [60, 80, 100, 1000])
def test_a_terminal_of_any_width_shows_all_of_a_run(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = "rank 0 was killed by the kernel for want of memory, at 31.4 GB of 32 GB"
    keep("train", ("lost", {"rank": 0, "reason": ""}), severities=("critical", "warning"), cause=cause)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command.format_rows(listed())
    shown = " ".join(line.strip() for line in lines)
    for words in ("train-1 ", " failed: rank 0 was killed", " 119", "1 critical (RankLost at step 105), 1 warning"):
        assert words in shown
    assert (cause in shown) is (columns <= 100), "a row of a table has the beginning"
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize("columns", [60, 80])
def test_the_line_of_one_run_is_wrapped_between_words(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep("train", ("snapshot on disk", {"seq": 10}), BYE, severities=("warning",))
    whole = invoked("train").output.splitlines()[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    cli.main(["last", "train"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[: lines.index("train (train-1)")]) == whole
    assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("job7", ["job7-train"]),
        ("train-1a", ["train-1a2b"]),
        ("train-2", ["train-2"]),
        ("train", ["train-2"]),
    ],
    ids=["of torchrun's", "of our own", "an id that another begins with", "a name"],
)
def test_the_beginning_of_an_id_names_a_run_unless_it_is_a_name_or_an_id(named: str, found: list[str]) -> None:
    for run_id in ("job7-train", "job81-train", "train-1a2b", "train-2b", "train-2"):
        keep("train", run_id=run_id)
    export = CliRunner().invoke(cli, ["history", "export", named])
    (row, *_) = listed(named)
    assert ([row["run_id"]], export.exit_code) == (found, 0)


@pytest.mark.parametrize(
    "command", [["last"], ["history", "export"], ["incidents", "--run"], ["rules", "status", "--run"]]
)
def test_a_beginning_that_several_ids_share_is_an_error_that_names_them(command: list[str]) -> None:
    for run_id in ("job7-train", "job81-train"):
        keep("train", run_id=run_id)
    error = CliRunner().invoke(cli, [*command, "job"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "several runs have an id that begins with job: job81-train, job7-train"


@pytest.mark.parametrize("command", [["history", "export"], ["report"], ["last"]])
def test_a_damaged_history_is_not_taken_for_another_whose_id_begins_with_its_own(command: list[str]) -> None:
    """Ids of Slurm jobs can begin with one another."""
    keep("train", BYE, run_id="12345")
    (paths.state_directory() / "runs" / "1234.sqlite").write_bytes(b"no database")
    result = CliRunner().invoke(cli, [*command, "1234"])
    assert result.exit_code == 1
    assert "1234.sqlite: not a history that can be read" in result.stderr + str(result.exception)


def test_an_id_that_was_completed_is_printed_on_stderr() -> None:
    keep("train", BYE, run_id="12345")
    result = CliRunner().invoke(cli, ["last", "1234", "--json"])
    assert json.loads(result.stdout)[0]["run_id"] == "12345"
    assert result.stderr == "sentinel: 1234 is taken for 12345\n"
    assert CliRunner().invoke(cli, ["last", "12345"]).stderr == ""
