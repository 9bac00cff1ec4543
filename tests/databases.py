"""The connections to SQLite files that the code under test opens: a test can keep such a file from growing."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest


def note_connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """Return the list to which each connection is added that is opened from now on."""
    made, connect = list[sqlite3.Connection](), sqlite3.connect

    def connect_and_note(*arguments: Any, **more: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", connect_and_note)
    return made


def fill_disk(database: sqlite3.Connection, spare: int = 0) -> None:
    """Keep the file from growing by more than `spare` pages, as on a full disk."""
    ((pages,),) = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count={pages + spare}")


def make_room(database: sqlite3.Connection) -> None:
    """Let the file grow again."""
    database.execute("PRAGMA max_page_count=1000000")
