"""Which histories are deleted, and which stay."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sentinel.config import settings
from sentinel.daemon.tenancy import retention_task
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.store import History, Store, retention
from sentinel.store.retention import StoredHistory

NOW = 1e9
DAY = 86400.0


def kept(name: str, days: float, size: int = 100) -> StoredHistory:
    return StoredHistory(Path(name), size, NOW - days * DAY)


@pytest.mark.parametrize(
    ("days", "max_age", "max_bytes", "gone"),
    [
        ([5, 3, 1], 10, 1e9, []),
        ([5, 3, 1], 4, 1e9, ["a age"]),
        ([5, 3, 1], 10, 250, ["a size"]),
        ([5, 3, 1], 10, 0, ["a size", "b size", "c size"]),
        ([5, 3, 1], 4, 150, ["a age", "b size"]),
        ([5, 3, 0.01], 10, 0, ["a size", "b size"]),  # the last was written to a quarter of an hour ago
        ([5, 3, 1], 10, 300, []),
    ],
)
def test_histories_over_the_age_are_deleted_and_then_the_oldest(
    days: list[float], max_age: float, max_bytes: float, gone: list[str]
) -> None:
    histories = [kept(name, age) for name, age in zip("abc", days, strict=True)]
    found = retention.list_doomed(histories, max_age=max_age * DAY, max_bytes=max_bytes, now=NOW)
    assert [f"{one.kept.path} {one.why}" for one in found] == gone


def written(folder: Path, name: str, days: float) -> Path:
    path = folder / f"{name}.sqlite"
    Store(path, run=name, run_id=name).close()
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def test_an_open_history_stays(tmp_path: Path) -> None:
    live = Store(tmp_path / "live.sqlite", run="live", run_id="live")
    live.records.add_event(0, 1, "phase")
    live.write()
    read, old = written(tmp_path, "read", 100), written(tmp_path, "old", 100)
    os.utime(tmp_path / "live.sqlite", (0, 0))
    os.utime(tmp_path / "live.sqlite-wal", (0, 0))
    with History(read):
        gone = retention.prune(tmp_path, max_age=DAY, max_bytes=1e9)
    assert {one.kept.path for one in gone} <= {old, read}  # a reader of an ended run holds no lock
    assert not old.exists()
    assert (tmp_path / "live.sqlite").exists()
    live.records.add_event(0, 2, "phase")
    live.close()
    assert live.trouble == ""
    with History(tmp_path / "live.sqlite") as history:
        assert [event.seq for event in history.events()] == [1, 2]


def test_a_damaged_history_is_deleted_with_the_files_beside_it(tmp_path: Path) -> None:
    names = ["a.sqlite", "a.sqlite-wal", "a.sqlite-shm", "b.sqlite.damaged-20260101T000000"]
    for name in names:
        (tmp_path / name).write_bytes(b"no database at all")
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "notes.txt").write_text("somebody's own")
    retention.prune(tmp_path, max_age=DAY, max_bytes=1e9)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_daemon_deletes_what_is_over_the_limits(tmp_path: Path) -> None:
    old, new = written(tmp_path, "old", 3), written(tmp_path, "new", 1)

    async def until_it_is_gone() -> None:
        limits = settings.HistorySettings(max_age=settings.Duration(2 * DAY))
        tenants = cast("Tenants", SimpleNamespace(folders=lambda: [tmp_path]))
        house = asyncio.create_task(retention_task.keep_house(tenants, limits))
        while old.exists():  # noqa: ASYNC110 (a thread deletes it)
            await asyncio.sleep(0.01)
        house.cancel()

    asyncio.run(until_it_is_gone())
    assert (old.exists(), new.exists()) == (False, True)
