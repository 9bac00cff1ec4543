"""A history that is damaged while it is written, which SQLite, working from its cache, would not notice."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.notify.outbox import list_undelivered
from sentinel.runs.steps import RunStep
from sentinel.store import History, Store, retention
from tests.store.test_locked import no_descriptor_left


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def not_a_database(path: Path) -> None:
    path.write_bytes(b"these are the notes of somebody who meant another file\n" * 50_000)


def folder_removed(path: Path) -> None:
    shutil.rmtree(path.parent)


def fill(made: Store, first: int, last: int) -> None:
    for seq in range(first, last):
        values = {"loss": float(seq), "grad_norm": seq * 0.37}
        made.records.add_step(0, RunStep(seq, 1e9 + seq, {0: values}, values))
    made.records.put_incident("0.1", first, {"alert": "LossSpike", "text": "x" * 20_000})
    made.write()


@pytest.mark.parametrize("harm", [emptied, cut_short, not_a_database, Path.unlink, folder_removed])
def test_a_new_history_begins_with_the_attempts_and_incidents_so_far(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "runs" / "r1.sqlite"
    made = Store(path, run="train", run_id="r1")
    made.records.begin_attempt(0, b"")
    fill(made, 0, 3000)
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    fill(made, 3000, 3001)
    harm(path)
    fill(made, 3001, 3601)
    assert "a new one begins" in made.notes[0]
    assert made.trouble == ""
    made.close()
    with History(path) as history:
        assert list(history.series("loss").seqs)[-600:] == list(range(3001, 3601))
        assert len(history.attempts()) == len(history.incidents()) == 1
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()


def test_a_folder_that_was_removed_and_cannot_be_made_again_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "state" / "r1.sqlite"
    made = Store(path, run="train", run_id="r1")
    fill(made, 0, 10)
    shutil.rmtree(path.parent)
    path.parent.symlink_to(tmp_path / "nowhere")
    for seq in range(10, 12):
        fill(made, seq, seq + 1)
        assert "File exists" in made.trouble
    path.parent.unlink()
    fill(made, 12, 13)
    assert made.trouble == ""
    assert made.notes[0] == f"the history was deleted: {path}; a new one begins"
    assert "is written again" in made.notes[1]
    made.close()
    with History(path) as history:
        assert list(history.series("loss").seqs) == list(range(13))


@pytest.mark.parametrize("name", ["run#1", "50%41", "a?mode=memory", "with space"])
def test_folders_of_any_name(name: str, tmp_path: Path) -> None:
    """`#`, `?` and `%` are special in a URI: another file was looked at, and a history in use was taken for unused."""
    path = tmp_path / name / "r1.sqlite"
    made = Store(path, run="train", run_id="r1")
    fill(made, 0, 10)
    assert retention.in_use(path)
    with History(path) as history:
        assert len(history.series("loss").seqs) == 10
    made.close()
    assert not retention.in_use(path)
    assert list_undelivered(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_history_that_cannot_be_opened_is_kept(tmp_path: Path) -> None:
    """Only SQLite's "busy" counted as in use, and any other failure to open it as permission to delete it."""
    path = tmp_path / "r1.sqlite"
    made = Store(path, run="train", run_id="r1")
    fill(made, 0, 10)
    with no_descriptor_left():
        assert not retention.remove(path)
    made.close()
    assert retention.remove(path)


@pytest.mark.processes
@pytest.mark.namespaces
@pytest.mark.parametrize("sides", [["", "-wal"], [""]], ids=["of a killed daemon", "closed"])
def test_a_history_is_deleted_on_a_full_disk(sides: list[str], tmp_path: Path) -> None:
    """SQLite cannot even open it there for want of room: it is what must go to make room."""
    path, disk = tmp_path / "r1.sqlite", tmp_path / "disk"
    made = Store(path, run="train", run_id="r1")
    fill(made, 0, 10)
    disk.mkdir()
    copies = "; ".join(f"cp {path}{side} {disk}/old.sqlite{side}" for side in sides)
    code = (
        "import sys, pathlib; from sentinel.store import retention; print(retention.remove(pathlib.Path(sys.argv[1])))"
    )
    full = f"mount -t tmpfs -o size=2m tmpfs {disk}; {copies}; ! cat /dev/zero > {disk}/rest 2> {tmp_path}/error"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-ec", f"{full}; exec {sys.executable} -c '{code}' {disk}/old.sqlite"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    made.close()
    assert (done.stdout, done.stderr) == ("True\n", "")
