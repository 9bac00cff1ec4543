"""A history that somebody harms while it is written: SQLite, which works from its cache, would not see it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.steps import Step
from sentinel.store import History, Store


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def not_a_database(path: Path) -> None:
    path.write_bytes(b"these are the notes of somebody who meant another file\n" * 50_000)


def fill(made: Store, first: int, last: int) -> None:
    for seq in range(first, last):
        values = {"loss": float(seq), "grad_norm": seq * 0.37}
        made.step(0, Step(seq, 1e9 + seq, {0: values}, values))
    made.incident("0.1", first, {"alert": "LossSpike", "text": "x" * 20_000})
    made.flush()


@pytest.mark.parametrize("harm", [emptied, cut_short, not_a_database, Path.unlink])
def test_a_new_one_begins_and_holds_what_must_stand_in_it(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = tmp_path / "r1.sqlite"
    made = Store(path, run="train", run_id="r1")
    made.attempt(0, b"")
    fill(made, 0, 3000)
    made._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
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
