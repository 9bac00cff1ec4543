"""A history that is damaged while the daemon runs, and receivers that cannot be reached: both are reported."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.cli.client import ask_daemons
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import sentinel
from tests.daemon.test_notifications import HIGH, LOW, nothing_more, write
from tests.notify.consumer import Consumer, consumer

pytestmark = pytest.mark.processes


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Consumer]:
    with consumer() as made:
        monkeypatch.setenv("OPS", made.url)
        yield made


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "rules.yaml").write_text(
        "group: mine\nrules:\n  - alert: TooHigh\n    scope: run\n    expr: loss > 100\n    severity: warning\n"
    )
    return ("--config", write(tmp_path), "--rules", str(tmp_path / "rules.yaml"))


def status() -> dict[str, Any]:
    (answer,) = ask_daemons("status")
    (run,) = answer["runs"]
    assert isinstance(run, dict)
    return run


def told(rank: SimulatedRank, words: str) -> None:
    while words not in rank.expect(wire.Notice).text:
        pass


def rows(path: Path, table: str) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        try:
            return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        except sqlite3.Error:
            return 0


@pytest.mark.slow
def test_a_history_that_is_cut_short_is_moved_aside_and_all_goes_on_over_a_kill_too(
    ops: Consumer, options: tuple[str, ...]
) -> None:
    with daemon_process(*options) as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        assert ops.next()["status"] == "firing"
        history = Path(status()["history"])
        with contextlib.closing(sqlite3.connect(history)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        os.truncate(history, 100)
        rank.steps(2, [HIGH])
        told(rank, "a new one begins")
        assert list(history.parent.glob(f"{history.name}.damaged-*"))
        deadline = time.monotonic() + 60
        while not (rows(history, "incidents") and rows(history, "outbox") and rows(history, "ranks")):
            assert time.monotonic() < deadline
            rank.steps(3, [HIGH])
        assert status()["trouble"] == ""
        process.kill()
        process.wait()
    with daemon_process(*options) as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello(next_seq=4)
        rank.steps(4, [LOW])
        assert ops.next()["status"] == "resolved"
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    assert nothing_more(ops)


@pytest.mark.slow
def test_a_page_whose_incident_cannot_be_read_after_a_kill_is_closed(ops: Consumer, options: tuple[str, ...]) -> None:
    with daemon_process(*options) as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        fired = ops.next()
        history = Path(status()["history"])
        while status()["notifications"][0]["pending"] or not (rows(history, "outbox") and rows(history, "incidents")):
            pass
        process.kill()
        process.wait()
    with contextlib.closing(sqlite3.connect(history)) as database, database:
        assert database.execute("UPDATE incidents SET body = zeroblob(40)").rowcount == 1
    with daemon_process(*options) as (path, process), SimulatedRank(path, session="s") as rank:
        rank.hello(next_seq=2)
        over = ops.next()
        assert (fired["status"], over["status"]) == ("firing", "resolved")
        assert fired["alerts"][0]["fingerprint"] == over["alerts"][0]["fingerprint"]
        rank.steps(2, [LOW])
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    assert nothing_more(ops)
    (case,) = json.loads(sentinel("incidents", "--json").stdout)
    assert (case["id"], case["state"], case["done"]) == ("0.1", "resolved", ["over: attempt 1 began"])


def test_a_dead_mans_switch_is_told_while_a_run_is_watched(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    settings = tmp_path / "sentinel.toml"
    with consumer() as switch:
        settings.write_text(f"{settings.read_text()}[heartbeat]\nurl = '{switch.url}'\ninterval = '50ms'\n")
        with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
            rank.hello()
            assert [switch.next() for _ in range(3)] == [{}] * 3
            assert ask_daemons("status")[0]["heartbeat"]["trouble"] == ""
            rank.say(wire.Goodbye())
            assert ended(process) == 0


@pytest.mark.slow
def test_what_could_not_be_delivered_is_in_status_and_once_in_the_next_run(
    ops: Consumer, options: tuple[str, ...]
) -> None:
    ops.answers += [404, 404]
    said = "not delivered of run train (r1): TooHigh to ops (it answers 404); sentinel incidents shows it"
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [LOW, HIGH])
        assert ops.next()["status"] == "firing"
        while not status()["notifications"][0]["given_up"]:
            pass
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    shown = sentinel("status")
    assert said in shown.stdout
    assert json.loads(sentinel("status", "--json").stdout) == []
    for run_id, expected in (("r2", True), ("r3", False)):
        with daemon_process(*options, run_id=run_id) as (path, process), SimulatedRank(path, run_id=run_id) as rank:
            rank.hello()
            rank.steps(0, [LOW, HIGH])
            notices = [rank.expect(wire.Notice).text]
            while "TooHigh" not in notices[-1] or "┏" not in notices[-1]:
                notices.append(rank.expect(wire.Notice).text)
            assert (f"[sentinel] {said}" in notices) is expected
            rank.say(wire.Goodbye())
            assert ended(process) == 0
        ops.answers.clear()
