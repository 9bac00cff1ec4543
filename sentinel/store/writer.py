"""Writes one run's history."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.steps import Step
from sentinel.store import thinning
from sentinel.store.layout import ADDED, READABLE, RUN, SCHEMA, TABLES, packed_layers
from sentinel.store.pending_writes import PendingWrites, Whose, Write

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""Between two transactions, each of which wakes a thread: at most so much is missing after kill -9, and the ranks send
that again."""
PATIENCE_SECONDS = 1.0
"""For the disk, where somebody waits who has more to do: an alert is told though it cannot be kept."""
MAGIC = b"SQLite format 3\0"
"""With which a database begins (sqlite.org/fileformat.html, 1.3)."""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Store:
    """Writes one run's history. Never raises after it was opened: what cannot be written is said in `trouble`.

    What it is told is queued; `flush` writes it in one transaction, and may be called from a thread of its own. The
    write-ahead log with synchronous=NORMAL survives the end of the process, kill -9 too; a power cut may cost the
    newest transactions.
    """

    def __init__(self, path: Path, *, run: str, run_id: str, source: str = "") -> None:
        """`source`: where it comes from, if not from a daemon that watches."""
        self.path = path
        self.trouble = ""
        self.bytes = 0
        """On the disk, as of the last transaction."""
        self.lost = 0
        """Rows that were given up, as the disk was full for too long."""
        self.before_moving: Callable[[], None] = lambda: None
        """Closes what else of ours has the file open, before it is moved aside."""
        self.notes: list[str] = []
        """What is to be said once."""
        self._late: threading.Thread | None = None
        """Writes for somebody who does not wait for ever."""
        self._transaction = threading.RLock()
        """Over the connection: SQLite does not survive that one thread closes what another is in the middle of."""
        self._closed = False
        self._checkpoints: set[tuple[int, int]] = set()
        """(attempt, seq) of those that are in the file."""
        self._pending = PendingWrites()
        self._standing: dict[tuple[str, ...], Write] = {}
        """Rows that a history which takes the place of a damaged one begins with."""
        self._due = self._unthinnable = False
        self._least = 0
        """Bytes of the file after the last transaction: it only grows."""
        self._newest = (0, -1)
        """(attempt, seq) of the newest step."""
        self._meta = {"schema": str(SCHEMA), "run": run, "run_id": run_id, "source": source}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = self._connected()
        except (sqlite3.Error, OSError) as error:
            if not _is_damage(error):
                raise ConfigError(_trouble(path, error)) from None
            self.set_aside(str(error))

    def _connected(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def set_aside(self, why: str) -> None:
        """Move a damaged file away, and begin a new one with what must stand in it. Raises ConfigError."""
        self.before_moving()
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._database.close()
        aside = f"{self.path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have cleaned up
            for side in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{side}", f"{aside}{side}")
            self._least, self._database = 0, self._connected()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(_trouble(self.path, error)) from None
        self._checkpoints.clear()
        self._pending.put_first(self._standing.values())
        gone = f"damaged ({why}) and is moved to {aside}" if os.path.exists(aside) else f"deleted: {self.path}"
        self.notes.append(f"the history was {gone}; a new one begins")
        log.error("the history was %s; a new one begins", gone)

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Make the tables, or what an older schema lacks of them."""
        database.executescript(TABLES)
        for key, value in self._meta.items():
            database.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        ((found,),) = database.execute("SELECT value FROM meta WHERE key = 'schema'")
        if found not in READABLE:
            raise ConfigError(f"history is not written: {self.path} has schema {found}, this version writes {SCHEMA}")
        for table, column, kind in ADDED:
            if column not in {row[1] for row in database.execute(f"PRAGMA table_info({table})")}:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        for key in ("schema", "source"):
            database.execute("UPDATE meta SET value = ? WHERE key = ?", (self._meta[key], key))
        self._checkpoints = set(database.execute("SELECT attempt, seq FROM checkpoints"))

    def attempt(self, number: int, hello: bytes) -> None:
        """An attempt began; `hello` as it came over the wire. Nobody will go on from the states of older ones."""
        self._stand(("attempt",), "INSERT OR REPLACE INTO attempts VALUES (?, ?, NULL, ?)", number, time.time(), hello)
        for key in [key for key in self._standing if key[0] in ("rank", "table")]:
            del self._standing[key]
        for table in ("states", "checkpoints", "tables"):
            self._write(f"DELETE FROM {table} WHERE attempt < ?", number)

    def ended(self, number: int) -> None:
        """All ranks of an attempt are gone."""
        self._write("UPDATE attempts SET ended = ? WHERE number = ?", time.time(), number)

    def rank(self, attempt: int, rank: int, *, process: int, hello: bytes) -> None:
        """A rank arrived, or came back: the attempt has not ended."""
        self._write("UPDATE attempts SET ended = NULL WHERE number = ?", attempt)
        insert = "INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, 0, ?)"
        self._stand(("rank", str(rank)), insert, attempt, rank, process, hello)

    def gone(self, attempt: int, rank: int) -> None:
        """A rank said goodbye."""
        self._write("UPDATE ranks SET gone = 1 WHERE attempt = ? AND rank = ?", attempt, rank)

    def table(self, attempt: int, digest: str, body: bytes) -> None:
        """A layer table, as it came over the wire."""
        self._stand(("table", digest), "INSERT OR IGNORE INTO tables VALUES (?, ?, ?)", attempt, digest, body)

    def state(self, attempt: int, seq: int, body: bytes, checkpoints: Sequence[tuple[int, bytes]]) -> None:
        """What another daemon would go on from, after step `seq`. `checkpoints`: all of them; new ones are added."""
        self._write("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", attempt, seq, body)
        wanted = {(attempt, at): state for at, state in checkpoints}
        for key in self._checkpoints - wanted.keys():
            self._write("DELETE FROM checkpoints WHERE attempt = ? AND seq = ?", *key)
        for key in wanted.keys() - self._checkpoints:
            self._write("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", *key, wanted[key])
        self._checkpoints = set(wanted)

    def step(self, attempt: int, step: Step) -> None:
        """A closed step. Ranks apart only where there are several: of rank 0 alone, the run's values are its own."""
        self._newest = (attempt, step.seq)
        self._append(attempt, RUN, step.seq, step.time, step.run)
        if step.ranks.get(0) != step.run or len(step.ranks) > 1:
            for rank, values in step.ranks.items():
                self._append(attempt, rank, step.seq, step.time, values)
        if step.layers is not None:
            body = packed_layers(step.layers)
            self._write("INSERT OR REPLACE INTO layers VALUES (?, ?, ?)", attempt, step.seq, body)

    def reading(self, attempt: int, device: str, seq: int, time: float, values: Mapping[str, float]) -> None:
        """A GPU or the host as it was read, after step `seq`."""
        self._append(attempt, device, seq, time, values)

    def incident(self, identity: str, seq: int, body: dict[str, Any]) -> None:
        """An incident as it is now."""
        packed = msgspec.msgpack.encode(body)
        self._stand(("incident", identity), "INSERT OR REPLACE INTO incidents VALUES (?, ?, ?)", identity, seq, packed)

    def event(self, attempt: int, seq: int, kind: str, **detail: Any) -> None:
        """Something that happened once; what a rank tells again, because a daemon was killed, is known already."""
        body = msgspec.msgpack.encode(detail)
        self._write(_EVENT, time.time(), attempt, seq, kind, body, attempt, kind, seq, body)

    def flush(self, patience: float | None = PATIENCE_SECONDS) -> None:
        """Write what is new in one transaction. Where the disk is full, keep what fits in memory and try again. A disk
        that does not answer is waited for so many seconds, and not at all the next time; None: until it does."""
        if patience is None:
            return self._flush()
        if self._late is not None and self._late.is_alive():
            return None
        self._late = threading.Thread(target=self._flush, name="sentinel-history", daemon=True)
        self._late.start()
        self._late.join(patience)
        if self._late.is_alive() and not self.trouble:
            self.trouble = _trouble(self.path, TimeoutError(f"no answer from the disk in {patience:g} s"))
        return None

    def _flush(self) -> None:
        with self._transaction:
            writes = self._pending.take() if not self._closed else []
            if not writes:
                return
            if why := self._harmed():
                self.damaged(why)
            try:
                self._database.execute("BEGIN IMMEDIATE")
                for statement, values in writes:
                    self._database.execute(statement, values)
                self._database.execute("COMMIT")
                self.trouble = ""
                self.bytes, self._least = self._size(), self.path.stat().st_size
            except (sqlite3.Error, OSError) as error:
                self._failed(error, writes)
            else:
                self._thin()

    def _failed(self, error: sqlite3.Error | OSError, writes: list[Write]) -> None:
        """A transaction did not succeed. A damaged file is replaced, and written to at the next flush."""
        if not self.trouble or not isinstance(error, sqlite3.ProgrammingError):  # closed: `damaged` has said why
            self.trouble = _trouble(self.path, error)
        with contextlib.suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        self.lost += self._pending.put_back(writes)
        if _is_damage(error):
            self.damaged(str(error))

    def damaged(self, why: str) -> None:
        """The file cannot be used: another takes its place. Where that fails, it is said in `trouble`."""
        with self._transaction:
            try:
                self.set_aside(why)
            except ConfigError as error:
                self.trouble = str(error)

    def _thin(self) -> None:
        """Thin a stretch of what is far behind, where a chunk has been filled since."""
        if not self._due or self._unthinnable:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._due = thinning.thin(self._database, *self._newest)
            self._database.execute("COMMIT")
        except (sqlite3.Error, zlib.error, msgspec.MsgspecError, ValueError) as error:
            # The disk is full, or a chunk is damaged: all that was written stays as it is.
            self._due, self._unthinnable = False, not isinstance(error, sqlite3.OperationalError)
            log.warning("%s: is not thinned: %s", self.path, error)
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    def _harmed(self) -> str:
        """What is wrong with the file at a glance: SQLite works from its cache, and would not see it for hours."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._least:
                    return "it was cut short"
                return "file is not a database" if self._least and file.read(len(MAGIC)) != MAGIC else ""
        except OSError as error:
            return "it was deleted" if isinstance(error, FileNotFoundError) else ""

    def _size(self) -> int:
        try:
            return sum(os.stat(f"{self.path}{side}").st_size for side in ("", "-wal"))
        except OSError:
            return self.bytes

    def close(self) -> None:
        """Write the rest and fold the write-ahead log into the file, which is then one file."""
        with self._transaction:
            self.flush(None)
            try:
                self._database.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.Error:
                pass  # a reader has it open: the log stays beside the file, and both are read
            self._database.close()
            self._closed = True

    def _stand(self, key: tuple[str, ...], statement: str, *values: Any) -> None:
        """Write what a history cannot do without."""
        self._standing[key] = (statement, values)
        self._write(statement, *values)

    def _write(self, statement: str, *values: Any) -> None:
        self._pending.add(statement, *values)

    def _append(self, attempt: int, whose: Whose, seq: int, time: float, values: Mapping[str, float]) -> None:
        if self._pending.append(attempt, whose, seq, time, values) and whose == RUN:
            self._due = True


_EVENT = """
INSERT INTO events SELECT ?, ?, ?, ?, ? WHERE NOT EXISTS
    (SELECT 1 FROM events WHERE attempt = ? AND kind = ? AND seq = ? AND body = ?)
"""


def _is_damage(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED


def _trouble(path: Path, error: Exception) -> str:
    return (
        f"history is not written: {path}: {error}; alerts and rollback go on; "
        "make room there, or set SENTINEL_STATE to another local directory"
    )
