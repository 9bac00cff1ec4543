"""A history is closed by one thread while another may be about to write: SQLite does not survive both at once."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from sentinel.store import History, Store


class Watched:
    """A connection that records the calls during which another thread could have used it."""

    def __init__(self, store: Store) -> None:
        self._database, self._lock = store._database, store._transaction
        self.exposed: list[str] = []

    def _guarded(self, call: str) -> None:
        def free() -> bool:
            if got := self._lock.acquire(blocking=False):
                self._lock.release()
            return got

        with ThreadPoolExecutor(1) as other:
            if other.submit(free).result():
                self.exposed.append(call)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._guarded(statement)
        return self._database.execute(statement, *values)

    def close(self) -> None:
        self._guarded("close")
        self._database.close()


def test_nothing_is_written_while_a_history_closes_or_after(tmp_path: Path) -> None:
    store = Store(tmp_path / "r1.sqlite", run="train", run_id="r1")
    store.records.add_event(0, 1, "kept")
    watched = Watched(store)
    store._database = cast(sqlite3.Connection, watched)
    store.close()
    assert watched.exposed == []
    store.records.add_event(0, 2, "too late")
    store.write()
    assert store.trouble == ""
    with History(store.path) as history:
        assert [event.kind for event in history.events()] == ["kept"]
