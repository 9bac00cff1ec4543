"""A history that cannot be written for a while: locked, on a full disk, or without a descriptor."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.errors import ConfigError, DamageError
from sentinel.notify.entry import Entry
from sentinel.notify.outbox import Outbox, row
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import RUN, History, Store, pending_writes, writer
from tests.databases import fill_disk, make_room, note_connections

LAYERS = LayerStats(("a",), {"layer_grad_norm": array("f", [1.0])}, b"\x01")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "r1.sqlite"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file locked, as a tool does that copies it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.01)


def train(store: Store, first: int, last: int) -> None:
    for seq in range(first, last):
        store.records.add_step(0, RunStep(seq, 1e9 + seq, {0: {"loss": 1.0}, 1: {"loss": 2.0}}, {"loss": 1.5}, LAYERS))


@pytest.mark.usefixtures("impatient")
def test_samples_are_dropped_before_events_and_the_loss_is_counted_reported_and_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest rows used to go, whatever they were: attempts, ranks, incidents; 4,096 rows of layers stayed."""
    monkeypatch.setattr(pending_writes, "HELD_BYTES", 400_000)
    store = Store(path, run="train", run_id="r1")
    with locked(path):
        store.records.begin_attempt(0, b"\x80")
        store.records.add_rank(0, 0, process=1, hello=b"hello")
        store.records.keep_state(0, 3, b"state", [(1, b"checkpoint")])
        store.records.put_incident("0.1", 3, {"id": "0.1"})
        store.records.add_event(0, 3, "rollback", to=1)
        for seq in range(0, 5000, 500):
            train(store, seq, seq + 500)
            store.write()
        assert "database is locked" in store.trouble
        lost = store.dropped
        assert lost.keys() == {"layers"}
        assert lost["layers"] > 1000
    store.write()
    assert store.trouble == ""
    assert f"it lacks {lost['layers']:,} rows of layers" in store.notes[0]
    store.close()
    with History(path) as history:
        assert [number for number, *_ in history.attempts()] == [0]
        assert history.ranks(0)[0].hello == b"hello"
        assert history.state(0) == (3, b"state")
        assert history.checkpoints(0) == [(1, b"checkpoint")]
        assert [case["id"] for case in history.incidents()] == ["0.1"]
        assert [event.kind for event in history.events()] == ["rollback", "history gap"]
        assert history.events("history gap")[0].detail["dropped"] == lost
        assert len(history.series("loss").seqs) == 5000
        assert len(history.series("loss", rank=1).seqs) == 5000
        assert 5000 - len(history.layers()) == lost["layers"]


def test_a_checkpoint_that_was_dropped_is_written_with_the_next_state(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written once. If it were taken for written, a daemon that starts later could not rewind to it."""
    store = Store(path, run="train", run_id="r1")
    store.records.begin_attempt(0, b"\x80")
    store.write()
    with monkeypatch.context() as crowded:
        crowded.setattr(pending_writes, "HELD_BYTES", 0)
        store.records.keep_state(0, 3, b"state", [(1, b"checkpoint")])
    assert store.dropped == {"states": 2}
    store.records.add_event(0, 4, "snapshot", bytes=7)
    store.write()
    store.records.keep_state(0, 5, b"state", [(1, b"checkpoint")])
    store.close()
    with History(path) as history:
        assert history.checkpoints(0) == [(1, b"checkpoint")]


class Values(dict[str, float]):
    """Values of a step. Unlike a plain dict, they can be referred to weakly."""


@pytest.mark.usefixtures("impatient")
def test_the_last_samples_of_a_former_attempt_do_not_stay_in_memory_and_reach_the_file(path: Path) -> None:
    """Each attempt used to leave its last chunks of each rank and device in memory, until the run ended."""
    store = Store(path, run="train", run_id="r1")
    kept: list[weakref.ref[Values]] = []
    for attempt in range(3):
        store.records.begin_attempt(attempt, b"\x80")
        for seq in range(10):
            rows = [Values(loss=float(seq)) for _ in range(4)]
            kept += map(weakref.ref, rows)
            store.records.add_step(attempt, RunStep(seq, 1e9 + seq, {0: rows[0], 1: rows[1]}, rows[2]))
            store.records.add_reading(attempt, "gpu 0", seq, 1e9 + seq, rows[3])
            del rows
    with locked(path):
        store.write()
        assert "database is locked" in store.trouble
    assert sum(values() is not None for values in kept) == 40, "those of the present attempt"
    store.close()
    with History(path) as history:
        for attempt in range(3):
            for rank in (RUN, 0, 1):
                assert list(history.series("loss", attempt=attempt, rank=rank).seqs) == list(range(10))
            assert len(history.readings(["loss"], "gpu 0", attempt=attempt)["loss"].values) == 10


def test_events_are_written_where_samples_do_not_fit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    databases = note_connections(monkeypatch)
    store = Store(path, run="train", run_id="r1")
    fill_disk(databases[0], spare=2)
    store.records.begin_attempt(0, b"\x80")
    store.records.put_incident("0.1", 3, {"id": "0.1"})
    store.records.add_event(0, 3, "noise", text=os.urandom(10).hex())
    for seq in range(3000):
        value = float(int.from_bytes(os.urandom(6)))
        store.records.add_step(0, RunStep(seq, 1e9 + seq, {0: {"loss": value}}, {"loss": value}))
    store.write()
    assert "full" in store.trouble
    with History(path) as history:
        assert history.incident_count() == len(history.attempts()) == len(history.events()) == 1
    make_room(databases[0])
    store.write()
    assert store.trouble == ""
    store.close()
    with History(path) as history:
        assert len(history.series("loss").seqs) == 3000
        assert [event.kind for event in history.events()] == ["noise", "history gap"]


def test_a_locked_history_does_not_delay_the_others(tmp_path: Path) -> None:
    """A locked file delays no other: each flush of it took 5 s, and the histories of all other runs waited."""
    stores = [Store(tmp_path / f"r{number}.sqlite", run="train", run_id=f"r{number}") for number in range(8)]
    for store in stores:
        store.records.add_event(0, 1, "phase")
    with contextlib.ExitStack() as held:
        for store in stores[1:]:
            held.enter_context(locked(store.path))
        waiting = [store.begin_flush() for store in stores[1:]]
        stores[0].begin_flush().result()
        assert not any(flush.done() for flush in waiting)
    for flush in waiting:
        flush.result()
    for store in stores:
        assert store.trouble == ""
        store.close()


@pytest.mark.usefixtures("impatient")
def test_a_history_that_is_locked_at_the_beginning_is_opened_later(path: Path) -> None:
    Store(path, run="train", run_id="r1").close()
    with locked(path):
        store = Store(path, run="train", run_id="r1")
        assert not store.is_open
        assert "database is locked" in store.trouble
        store.records.put_incident("0.1", 3, {"id": "0.1"})
        store.write()
    store.write()
    assert (store.trouble, store.is_open) == ("", True)
    store.close()
    with History(path) as history:
        assert history.incident_count() == 1


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_descriptors_are_no_damage(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.begin_attempt(0, b"\x80")
    store.write()
    store.close()
    with no_descriptor_left():
        with pytest.raises(ConfigError) as raised:
            History(path)
        again = Store(path, run="train", run_id="r1")
        assert "unable to open" in again.trouble
        again.records.put_incident("0.1", 3, {"id": "0.1"})
        again.write()
    assert not isinstance(raised.value, DamageError)
    again.write()
    assert again.trouble == ""
    again.close()
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    with History(path) as history:
        assert len(history.attempts()) == history.incident_count() == 1


def test_the_outbox_of_a_locked_history_is_read(path: Path) -> None:
    """The daemon's loop used to wait 5 s for the lock, and to forget what an earlier daemon had left in the outbox."""
    Store(path, run="train", run_id="r1").close()
    before = Outbox(path)
    before.write([row(Entry(receiver="ops", alert="LossSpike"), 0.0)])
    before.close()
    with locked(path):
        outbox = Outbox(path)
        assert [entry.alert for entry in outbox.entries()] == ["LossSpike"]
        assert outbox.trouble == ""


def test_a_tool_that_reads_a_live_history_does_not_delete_its_log(path: Path) -> None:
    """A tool that reads a live history does not take itself for its last user, which deletes the log on closing.

    Each flush read the head of the file first, and closing it gave up the locks of the process: what was written after
    such a tool was in no file.
    """
    store = Store(path, run="train", run_id="r1")
    look = f"import sqlite3; d = sqlite3.connect({str(path)!r}); d.execute('SELECT * FROM meta').fetchall(); d.close()"
    for seq in range(3):
        store.records.add_event(0, seq, "phase")
        store.write()
        subprocess.run([sys.executable, "-c", look], check=True)
        with History(path) as history:
            assert len(history.events()) == seq + 1
    store.close()


def test_a_row_that_cannot_be_stored_does_not_keep_the_others_out(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.add_event(0, 2**63, "snapshot", bytes=7)
    store.records.add_event(0, 4, "snapshot", bytes=7)
    store.write()
    assert store.trouble == ""
    assert store.dropped == {"events": 1}
    store.close()
    with History(path) as history:
        assert [event.seq for event in history.events("snapshot")] == [4]


def test_a_closing_history_waits_until_it_is_unlocked(path: Path) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.put_incident("0.1", 3, {"id": "0.1"})
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        flush = store.begin_flush()
        other.execute("ROLLBACK")
        store.close()
        flush.result()
    with History(path) as history:
        assert history.incident_count() == 1


def test_a_disk_that_never_answers_does_not_keep_a_history_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(path, run="train", run_id="r1")
    store.records.add_event(0, 1, "phase")
    hangs, answers, pread = threading.Event(), threading.Event(), os.pread
    monkeypatch.setattr(os, "pread", lambda *given: (hangs.set(), answers.wait(), pread(*given))[2])
    flush = store.begin_flush()
    hangs.wait()
    store.close(0.0)
    assert not flush.done()
    answers.set()
    flush.result()
    store.close()
