"""A run returns while its history cannot be read for a moment: no file descriptor is free, or it is locked."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from sentinel import wire
from sentinel.daemon.tenancy.histories import PUT_OFF_SECONDS, Histories, Opened
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.runs import Runs
from sentinel.store import History, Store
from tests.store.test_locked import no_descriptor_left

IDENTITY = wire.Identity(run="train", run_id="r1", rank=0, world_size=1, pid=1, session="s")


def at(path: Path) -> Tenants:
    """Return users whose only run has its history at this path."""
    return cast("Tenants", SimpleNamespace(history=lambda _: path))


def begin_without_file(opened: Opened | None) -> Store:
    """Begin the first attempt of a watched run whose history cannot be written."""
    assert opened is not None
    assert opened.store is not None
    assert (opened.begins, opened.resumable) == (0, False)
    opened.store.records.begin_attempt(0, b"\x80")
    opened.store.write()
    assert "history is not written" in opened.store.trouble
    return opened.store


def test_the_run_is_asked_to_come_back_and_no_history_is_moved(tmp_path: Path) -> None:
    """A locked history used to be moved aside as damaged; a run that began again in it would replace its attempt 0."""
    path = tmp_path / "runs" / "r1.sqlite"
    before = Store(path, run="train", run_id="r1")
    before.records.begin_attempt(0, msgspec.msgpack.encode({}))
    before.records.put_incident("0.1", 3, {"id": "0.1", "state": "firing"})
    before.close()
    histories, run = Histories(at(path)), Runs().find_run(IDENTITY, 0.0)
    with no_descriptor_left():
        assert histories.open(run, IDENTITY, 10.0) is None
        assert histories.open(run, IDENTITY, 10.0 + PUT_OFF_SECONDS - 1) is None
        gone_on = histories.open(run, IDENTITY, 10.0 + PUT_OFF_SECONDS)
    assert gone_on is not None
    assert gone_on.store is None
    assert "unable to open" in gone_on.why_not
    opened = histories.open(run, IDENTITY, 80.0)
    assert opened is not None
    assert opened.store is not None
    assert (opened.begins, opened.resumable) == (1, True)
    opened.store.close()
    assert [one.name for one in path.parent.iterdir()] == ["r1.sqlite"]
    with History(path) as history:
        assert [case["id"] for case in history.incidents()] == ["0.1"]


def test_a_locked_history_is_not_waited_for(tmp_path: Path) -> None:
    """All runs of the node waited with it, up to ten seconds. Here the lock is gone after two."""
    path = tmp_path / "r1.sqlite"
    before = Store(path, run="train", run_id="r1")
    before.records.begin_attempt(0, msgspec.msgpack.encode({}))
    before.close()
    histories, run = Histories(at(path)), Runs().find_run(IDENTITY, 0.0)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        release = threading.Timer(2.0, other.rollback)
        release.start()
        assert histories.open(run, IDENTITY, 0.0) is None
        release.join()
    opened = histories.open(run, IDENTITY, 1.0)
    assert opened is not None
    assert opened.begins == 1
    assert opened.store is not None
    opened.store.close()


def test_a_new_run_without_a_descriptor_is_watched_and_its_history_opened_later(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "r1.sqlite"
    path.parent.mkdir()
    histories, run = Histories(at(path)), Runs().find_run(IDENTITY, 0.0)
    with no_descriptor_left():
        opened = histories.open(run, IDENTITY, 0.0)
        store = begin_without_file(opened)
    store.close()
    with History(path) as history:
        assert len(history.attempts()) == 1


@pytest.mark.slow
def test_a_run_whose_history_was_begun_on_a_full_disk_is_watched(tmp_path: Path) -> None:
    """Such a file has a header and no table. The run used to be put off for a minute, in which nothing watched it."""
    path = tmp_path / "r1.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as full:
        full.execute("PRAGMA journal_mode = WAL")
        full.execute("BEGIN IMMEDIATE")  # stands for a full disk: the content can be read, but not written
        opened = Histories(at(path)).open(Runs().find_run(IDENTITY, 0.0), IDENTITY, 0.0)
        store = begin_without_file(opened)
    store.close()
    with History(path) as history:
        assert len(history.attempts()) == 1


def test_a_damaged_history_is_moved_and_the_next_attempt_begins(tmp_path: Path) -> None:
    path = tmp_path / "r1.sqlite"
    path.write_bytes(b"no database" * 1000)
    opened = Histories(at(path)).open(Runs().find_run(IDENTITY, 0.0), IDENTITY, 0.0)
    assert opened is not None
    assert opened.store is not None
    assert "moved to" in opened.store.notes[0]
    opened.store.close()
    assert len(list(tmp_path.glob("r1.sqlite.damaged-*"))) == 1
