"""The history: what is written can be read back, with NaN and gaps; a full disk is reported and survived."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from array import array
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from sentinel.errors import ConfigError
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import CHUNK_STEPS, History, Store
from tests.databases import fill_disk, make_room, note_connections


def step(seq: int, **values: float) -> RunStep:
    return RunStep(seq=seq, time=1000.0 + seq, ranks={0: values}, run=values)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "r1.sqlite"


def test_series_come_back_over_chunks_with_gaps_and_nan(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    steps = 2 * CHUNK_STEPS + 10
    for seq in range(steps):
        values = {"loss": math.nan if seq == 300 else float(seq)}
        if seq % 8 == 0:
            values["grad_norm"] = seq / 2
        store.records.add_step(0, step(seq, **values))
        if seq % 100 == 0:
            store.write()
    store.close()
    with History(path) as history:
        loss, norm = history.series("loss"), history.series("grad_norm")
        assert history.signals() == ["loss", "grad_norm"]
    assert list(loss.seqs) == list(range(steps))
    assert math.isnan(loss.values[300])
    assert [v for i, v in enumerate(loss.values) if i != 300] == [float(i) for i in range(steps) if i != 300]
    assert list(norm.seqs) == list(range(0, steps, 8))
    assert list(norm.times) == [1000.0 + seq for seq in range(0, steps, 8)]


def test_ranks_are_kept_apart_where_there_are_several(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.add_step(0, RunStep(seq=0, time=0.0, ranks={0: {"loss": 1.0}, 1: {"loss": 3.0}}, run={"loss": 2.0}))
    store.close()
    with History(path) as history:
        assert [list(history.series("loss", rank=rank).values) for rank in (-1, 0, 1)] == [[2.0], [1.0], [3.0]]


def test_layers_incidents_and_events_come_back(path: Path) -> None:
    layers = LayerStats(("a", "b"), {"layer_grad_norm": array("f", [1.5, math.inf])}, b"\x01\x01")
    store = Store(path, run="train", run_id="r1")
    store.records.begin_attempt(0, msgspec.msgpack.encode({"step_offset": 7, "facts": {"model": "gpt"}}))
    store.records.add_step(0, msgspec.structs.replace(step(4, loss=1.0), layers=layers))
    store.records.put_incident("0.1", 4, {"id": "0.1", "state": "firing"})
    store.records.put_incident("0.1", 4, {"id": "0.1", "state": "resolved"})
    store.records.add_event(0, 4, "snapshot", bytes=7)
    store.records.add_event(0, 5, "rollback", to=4)
    store.records.end_attempt(0)
    store.close()
    with History(path) as history:
        assert dict(history.layers()[0][1].items()) == dict(layers.items())
        (incident,), (final,) = history.incidents(), history.final_incidents()
        assert (incident["id"], incident["state"]) == ("0.1", "resolved")
        assert (final["over"], final["leaves"]) == (True, "")
        assert [event.kind for event in history.events()] == ["snapshot", "rollback"]
        assert history.events("rollback")[0].detail == {"to": 4}
        assert (history.step_offset(0), history.facts(0)) == (7, {"model": "gpt"})
        ((number, began, ended),) = history.attempts()
    assert number == 0
    assert ended is not None
    assert ended >= began


def test_more_of_the_last_step_is_in_its_row(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    for seq in range(3):
        store.records.add_step(0, step(seq, loss=1.0))
    store.write()
    store.records.add_step(0, step(2, val=4.0))
    store.close()
    with History(path) as history:
        assert [(seq, values) for seq, _, values in history.rows()][1:] == [
            (1, {"loss": 1.0}), (2, {"loss": 1.0, "val": 4.0}),
        ]  # fmt: skip


def test_how_long_a_run_took_is_from_its_first_attach_to_its_end(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.begin_attempt(0, b"\x80", 1000.0)
    store.records.end_attempt(0, 1010.0)
    store.records.begin_attempt(1, b"\x80", 1060.0)
    store.records.add_step(1, step(65, loss=1.0))
    store.write()
    with History(path) as history:
        assert history.lifetime(over=True) == (1000.0, 65.0), "its end was not seen"
    store.records.end_attempt(1, 1070.0)
    store.close()
    with History(path) as history:
        assert history.lifetime(over=True) == history.lifetime(over=False) == (1000.0, 70.0)


def test_a_live_history_can_be_read(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.add_step(0, step(0, loss=1.0))
    store.write()
    with History(path) as history:
        assert list(history.series("loss").values) == [1.0]
    store.close()


def test_what_was_flushed_survives_kill_9(path: Path) -> None:
    code = f"""
from pathlib import Path
from sentinel.runs.steps import RunStep
from sentinel.store.writer import Store
store = Store(Path({str(path)!r}), run="train", run_id="r1")
for seq in range(300):
    store.records.add_step(0, RunStep(seq=seq, time=0.0, ranks={{0: {{}}}}, run={{"loss": 1.0}}))
store.write()
print("flushed", flush=True)
import signal; signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"flushed\n"
        os.kill(process.pid, signal.SIGKILL)
    with History(path) as history:
        assert len(history.series("loss").values) == 300


def test_a_chunk_of_many_signals_has_fewer_steps(path: Path) -> None:
    store, names = Store(path, run="train", run_id="r1"), [f"signal {number}" for number in range(512)]
    for seq in range(100):
        store.records.add_step(0, step(seq, **dict.fromkeys(names, float(seq))))
    store.write()
    with closing(sqlite3.connect(path)) as database:
        spans = database.execute("SELECT first_seq, last_seq FROM chunks ORDER BY first_seq").fetchall()
    assert spans == [(0, 31), (32, 63), (64, 95), (96, 99)]
    store.close()
    with History(path) as history:
        assert [*history.series(names[-1]).values] == [float(seq) for seq in range(100)]


def test_a_full_disk_is_reported_and_what_waited_is_written_once_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases = note_connections(monkeypatch)
    store = Store(path, run="train", run_id="r1")
    fill_disk(databases[0])
    for seq in range(CHUNK_STEPS):
        store.records.add_step(0, step(seq, loss=math.sin(seq)))
    store.records.put_incident("0.1", 4, {"id": "0.1", "text": os.urandom(20_000)})
    store.write()
    assert str(path) in store.trouble
    assert "full" in store.trouble
    assert "SENTINEL_STATE" in store.trouble
    make_room(databases[0])
    store.write()
    assert store.trouble == ""
    store.close()
    with History(path) as history:
        assert len(history.series("loss").values) == CHUNK_STEPS
        assert len(history.incidents()) == 1


def test_what_a_disk_that_stays_full_costs_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.store.pending_writes.HELD_BYTES", 23_000)
    databases = note_connections(monkeypatch)
    store = Store(path, run="train", run_id="r1")
    fill_disk(databases[0])
    for seq in range(30):
        store.records.add_event(0, seq, "phase", text="x" * 1000)
    store.write()
    assert "full" in store.trouble
    assert store.dropped == {"events": 20}
    make_room(databases[0])
    store.close()
    with History(path) as history:
        *kept, gap = history.events()
    assert [event.seq for event in kept] == list(range(20, 30))
    assert (gap.kind, gap.detail["dropped"]) == ("history gap", {"events": 20})


def test_a_disk_that_is_full_to_the_end_leaves_a_history_that_says_what_it_lacks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    databases = note_connections(monkeypatch)
    store = Store(path, run="train", run_id="r1")
    for seq in range(CHUNK_STEPS):
        store.records.add_step(0, step(seq, loss=math.sin(seq)))
    store.records.add_event(0, 0, "hello", rank=0)
    store.write()
    fill_disk(databases[0])
    for seq in range(CHUNK_STEPS, 4 * CHUNK_STEPS):
        store.records.add_step(0, step(seq, loss=math.sin(seq)))
    store.records.add_event(0, 4 * CHUNK_STEPS, "goodbye", rank=0)
    store.close(0.0)
    with History(path) as history:
        assert len(history.series("loss").seqs) == CHUNK_STEPS
        assert [event.kind for event in history.events()] == ["hello", "goodbye", "history gap"]
        assert history.events("history gap")[0].detail["dropped"] == {"steps": 3 * CHUNK_STEPS}


def test_a_locked_history_of_which_nothing_waits_is_closed_without_a_write(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that is put off has such a history: the daemon's loop must not wait for the lock, or record a false gap."""
    Store(path, run="train", run_id="r1").close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        store = Store(path, run="train", run_id="r1")
        other.execute("ROLLBACK")
        store.close(0.0)
    assert caplog.messages[-1] == store.trouble != "", "and nothing is said to be missing"
    with History(path) as history:
        assert not list(history.events())


def test_chunks_that_grow_while_the_disk_is_full_push_nothing_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second rewrites the chunks of all ranks; only a minute of 64 ranks used to be kept, and no incident."""
    monkeypatch.setattr("sentinel.store.pending_writes.HELD_BYTES", 50_000)
    databases = note_connections(monkeypatch)
    store = Store(path, run="train", run_id="r1")
    fill_disk(databases[0])
    store.records.put_incident("0.1", 4, {"id": "0.1", "text": os.urandom(20_000)})
    for seq in range(20):
        ranks = {rank: {"loss": float(seq)} for rank in range(30)}
        store.records.add_step(0, RunStep(seq=seq, time=1000.0 + seq, ranks=ranks, run={"loss": float(seq)}))
        store.records.add_reading(0, "gpu 0", seq, 1000.0 + seq, {"gpu_power_watts": 1.0})
        store.write()
    assert "full" in store.trouble
    assert store.dropped == {}
    make_room(databases[0])
    store.close()
    with History(path) as history:
        assert len(history.incidents()) == 1
        for rank in (-1, 0, 29):
            assert list(history.series("loss", rank=rank).seqs) == list(range(20))
        assert len(history.readings(["gpu_power_watts"], "gpu 0")["gpu_power_watts"].seqs) == 20


def test_a_place_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"history is not written.*set SENTINEL_STATE"):
        Store(tmp_path / "file" / "runs" / "r1.sqlite", run="train", run_id="r1")


@pytest.mark.parametrize("content", [b"", b"this is no database", b"SQLite format 3\x00" + bytes(100)])
def test_a_file_that_is_no_history_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "r1.sqlite"
    broken.write_bytes(content)
    with pytest.raises(ConfigError, match="not a history that can be read"):
        History(broken)


def test_a_history_of_another_schema_is_a_clear_error(path: Path) -> None:
    Store(path, run="train", run_id="r1").close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    database.close()
    with pytest.raises(ConfigError, match="schema 99, this version reads 3"):
        History(path)


def test_a_history_of_schema_1_is_read_and_written_on(path: Path) -> None:
    Store(path, run="train", run_id="r1").close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
        for table in ("ranks", "tables", "states", "checkpoints"):
            database.execute(f"DROP TABLE {table}")
    database.close()
    with History(path) as history:
        assert history.ranks(0) == {}
        assert history.state(0) is None
    store = Store(path, run="train", run_id="r1")
    store.records.add_rank(0, 3, process=7, hello=b"hello")
    store.close()
    with History(path) as history:
        assert history.ranks(0)[3].process == 7


def test_steps_come_back_as_they_were_judged(path: Path) -> None:
    layers = LayerStats(("a",), {"layer_grad_norm": array("f", [1.5])}, b"\x01")
    steps = [
        RunStep(0, 10.0, {0: {"loss": 1.0}}, {"loss": 1.0}),
        RunStep(1, 11.0, {0: {"loss": 1.0, "x": 2.0}, 1: {"loss": 3.0}}, {"loss": 2.0, "x": 2.0}, layers),
        RunStep(3, 13.0, {1: {"loss": 3.0}}, {"loss": 3.0}),
    ]
    store = Store(path, run="train", run_id="r1")
    for one in steps:
        store.records.add_step(0, one)
    store.close()
    with History(path) as history:
        assert list(history.steps()) == steps
        assert list(history.steps(after=1)) == steps[2:]
        assert history.last_seq(0) == 3
        assert history.last_seq(1) == -1


def test_the_values_of_a_rank_that_is_alone_on_its_node_are_kept_once(path: Path) -> None:
    steps = [RunStep(seq, 10.0 + seq, {3: {"loss": 1.0 / (seq + 1)}}, {"loss": 1.0 / (seq + 1)}) for seq in range(20)]
    store = Store(path, run="train", run_id="r1")
    store.records.add_rank(0, 3, process=7, hello=b"hello", alone=True)
    for one in steps:
        store.records.add_step(0, one)
    store.close()
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT DISTINCT rank FROM chunks").fetchall() == [(-1,)]
    database.close()
    with History(path) as history:
        assert list(history.steps()) == steps
        assert list(history.series("loss", rank=3).values) == [step.run["loss"] for step in steps]
        assert not history.signals(rank=0)


def test_a_rank_that_others_may_join_is_kept_apart(path: Path) -> None:
    steps = [
        RunStep(0, 10.0, {1: {"loss": 3.0}}, {"loss": 3.0}),
        RunStep(1, 11.0, {0: {"loss": 1.0}, 1: {"loss": 3.0}}, {"loss": 2.0}),
    ]
    store = Store(path, run="train", run_id="r1")
    for rank, step in zip((1, 0), steps, strict=True):
        store.records.add_rank(0, rank, process=7, hello=b"hello")
        store.records.add_step(0, step)
    store.close()
    with History(path) as history:
        assert list(history.steps()) == steps


def test_states_and_checkpoints_are_replaced(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.keep_state(0, 5, b"five", [(1, b"a"), (3, b"b")])
    store.records.keep_state(0, 6, b"six", [(3, b"b"), (6, b"c")])
    store.close()
    store = Store(path, run="train", run_id="r1")
    store.records.keep_state(0, 8, b"eight", [(6, b"c")])
    store.write()
    with History(path) as history:
        assert history.state(0) == (8, b"eight")
        assert history.checkpoints(0) == [(6, b"c")]
    store.records.begin_attempt(1, b"")
    store.close()
    with History(path) as history:
        assert history.state(0) is None
        assert history.checkpoints(0) == []


def test_an_event_that_is_reported_twice_is_kept_once(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    for seq in (4, 4, 5):
        store.records.add_event(0, seq, "snapshot", rank=0, bytes=7)
    store.close()
    with History(path) as history:
        assert [event.seq for event in history.events()] == [4, 5]


def test_a_disk_that_does_not_answer_delays_no_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """An alert used to wait until the disk answered."""
    monkeypatch.setattr("sentinel.store.writer.SLOW_SECONDS", 0.0)
    before = set(threading.enumerate())
    store = Store(tmp_path / "r1.sqlite", run="train", run_id="r1")
    entered, answers, pread = threading.Event(), threading.Event(), os.pread

    def hang_then_answer(*arguments: int) -> bytes:
        entered.set()
        answers.wait()
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", hang_then_answer)
    request.addfinalizer(answers.set)
    store.records.add_event(0, 1, "phase")
    store.flush(0.01)
    assert entered.wait(60)
    assert "no answer from the disk in 0 s; alerts and rollback go on" in store.trouble
    store.records.add_event(0, 2, "phase")
    for _ in range(3):
        store.flush(0.01)  # the first write still waits, and no second thread starts
    (waiting,) = set(threading.enumerate()) - before
    assert waiting.name == "sentinel-history"
    answers.set()
    waiting.join(60)
    assert store.trouble == ""
    store.close()
    with History(store.path) as history:
        assert [event.seq for event in history.events() if event.kind == "phase"] == [1, 2]


def test_a_slow_reader_does_not_make_the_log_grow(tmp_path: Path) -> None:
    """Such a reader is `sentinel history export RUN | less`, left open overnight."""
    store = Store(tmp_path / "r1.sqlite", run="train", run_id="r1")
    for seq in range(20 * CHUNK_STEPS):
        store.records.add_step(0, RunStep(seq, 1e9 + seq, {0: {"loss": 1.0}}, {"loss": 1.0}))
    store.write()
    with History(store.path) as history:
        rows = history.rows()
        assert next(rows)[0] == 0
        with closing(sqlite3.connect(store.path)) as other:
            ((busy, *_),) = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        assert busy == 0
        assert [seq for seq, *_ in rows] == list(range(1, 20 * CHUNK_STEPS))
    store.close()


def test_a_node_with_another_number_or_another_name_goes_on_in_its_history(tmp_path: Path) -> None:
    """As a job that is queued again, or whose pod is made again."""
    path = tmp_path / "r1.sqlite"
    for node, hostname in ((0, "a"), (3, "a"), (3, "b")):
        Store(path, run="train", run_id="r1", node=node, hostname=hostname).close()
    with pytest.raises(ConfigError, match=r"is that of node 3 \(b\) of this job, and this is node 0 \(a\)"):
        Store(path, run="train", run_id="r1", node=0, hostname="a")
