"""Write one run's history."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec

from sentinel.errors import ConfigError
from sentinel.store import thinning
from sentinel.store.layout import ADDED, READABLE, SCHEMA, TABLES, is_damage
from sentinel.store.pending_writes import KINDS, VITAL, PendingWrites, Write
from sentinel.store.records import RunRecords

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""Seconds between two transactions, each of which wakes a thread: at most so much is missing after kill -9, and the
ranks send that again."""
PATIENCE_SECONDS = 0.25
"""Longest wait in seconds for the disk before an alert is sent: it is sent even if it cannot be stored. A transaction
takes some milliseconds."""
BUSY_SECONDS = 5.0
"""Seconds for which the writing thread waits for another process that has the file locked."""
SLOW_SECONDS = 5.0
"""Seconds after which a disk that does not answer is reported."""
CLOSING_SECONDS = 5.0
"""Seconds in which writing a history that cannot be written is tried again before it is closed."""
_RETRY_SECONDS = 0.1
MAGIC = b"SQLite format 3\0"
"""First bytes of a database (sqlite.org/fileformat.html, 1.3)."""
_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_PASSING_ERRNO = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO}
    | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE, errno.ETIMEDOUT}
)
_UNFIT = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError, ValueError)
"""Exceptions for a row that no file would take: an integer of 65 bits, half of a surrogate pair."""


class Store:
    """Writes one run's history. Never raises after it was opened: `trouble` says why something cannot be written.

    What `records` takes is queued. Each `flush` writes it in one transaction, on a thread of this history: a disk that
    does not answer delays no other history. The write-ahead log with synchronous=NORMAL survives the end of the
    process, even by kill -9; a power cut may cost the newest transactions.
    """

    def __init__(
        self, path: Path, *, run: str, run_id: str, source: str = "", node: int | None = None, hostname: str = ""
    ) -> None:
        """`source`: where the data come from, if not from a daemon that watches. `node`, `hostname`: the node, in a job
        over several nodes, whose history this is.

        Where the file is locked, the disk full or no descriptor left, it is opened at a later flush. Raises ConfigError
        where a history at that place will never be possible.
        """
        self.path = path
        self.bytes = 0
        """Bytes on the disk, as of the last transaction."""
        self.before_moving: Callable[[], None] = lambda: None
        """Called before the file is moved aside, to close other handles that this process has on it."""
        self.notes: list[str] = []
        """Notes that are to be reported once."""
        self._trouble = ""
        self._failing_since: float | None = None
        """Monotonic seconds at which a transaction failed after one that succeeded."""
        self._reported: Counter[str] = Counter()
        """The part of `dropped` that is recorded in the file."""
        self._flushes = threading.Lock()
        """Lock for `_asked` and `_began`."""
        self._asked: list[Future[None]] = []
        """Futures of callers that wait for a flush that has not begun."""
        self._began: float | None = None
        """Monotonic seconds at which the writing thread began its flush; None: there is no such thread."""
        self._transaction = threading.RLock()
        """Lock for the connection: SQLite crashes where one thread closes it while another uses it."""
        self._closed = False
        self._pending = PendingWrites()
        self.records = RunRecords(self._pending)
        self._unthinnable = False
        self._least = 0
        """Bytes of the file after the last transaction: it only grows."""
        self._place = {"node": str(node), "hostname": hostname} if node is not None else {}
        self._meta = {"schema": str(SCHEMA), "run": run, "run_id": run_id, "source": source, **self._place}
        self._database: sqlite3.Connection | None = None
        self._descriptor = -1
        """Descriptor of the file, for a look at its head. It is open for as long as the database is: a process that
        closes any descriptor of a file loses all its locks on it (fcntl(2)), and then the next tool that opens the
        history takes itself for the only one and deletes the write-ahead log in use."""
        try:
            self._database = self._connect(PATIENCE_SECONDS)
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                self.set_aside(str(error))
            elif _is_passing(error, path):
                self._fail(error)
            else:
                raise ConfigError(_trouble(path, error)) from None

    @property
    def trouble(self) -> str:
        """Why the history is not written, in words; empty while it is written."""
        began = self._began
        if not self._trouble and began is not None and (waited := time.monotonic() - began) > SLOW_SECONDS:
            return _trouble(self.path, TimeoutError(f"no answer from the disk in {waited:.0f} s"))
        return self._trouble

    @property
    def dropped(self) -> Mapping[str, int]:
        """Rows that were dropped, by kind, as the file could not be written for too long."""
        return self._pending.dropped

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._database is not None

    @property
    def owes(self) -> bool:
        """Whether rows that matter wait for a file that cannot be written."""
        return bool(self.trouble) and self._pending.count(VITAL) > 0

    def _connect(self, patience: float) -> sqlite3.Connection:
        """Open the file; wait for a locked one at most `patience` seconds."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        database = sqlite3.connect(self.path, timeout=patience, check_same_thread=False, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            self._prepare(database)
            database.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000:.0f}")
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            database.close()
            raise
        return database

    def set_aside(self, why: str) -> None:
        """Move a damaged file away, and begin a new one with the rows that it must have. Raises ConfigError."""
        self.before_moving()
        self._disconnect()
        aside = f"{self.path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}"
        try:
            for side in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{side}", f"{aside}{side}")
            gone = f"damaged ({why}) and is moved to {aside}" if os.path.exists(aside) else f"deleted: {self.path}"
            self.notes.append(f"the history was {gone}; a new one begins")
            log.error("the history was %s; a new one begins", gone)
            self._least = 0
            self.records.checkpoints.clear()
            self._pending.put_back(self.records.standing.values())
            self._database = self._connect(PATIENCE_SECONDS)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(_trouble(self.path, error)) from None

    def _disconnect(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._database is not None:
                self._database.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._database, self._descriptor = None, -1

    def _prepare(self, database: sqlite3.Connection) -> None:
        """Create the tables, or what an older schema lacks of them: everything, or nothing where that fails."""
        database.executescript(f"BEGIN IMMEDIATE; {TABLES}")
        for key, value in self._meta.items():
            database.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        ((found,),) = database.execute("SELECT value FROM meta WHERE key = 'schema'")
        if found not in READABLE:
            raise ConfigError(f"history is not written: {self.path} has schema {found}, this version writes {SCHEMA}")
        self._check_place(dict(database.execute("SELECT key, value FROM meta")))
        for table, column, kind in ADDED:
            if column not in {row[1] for row in database.execute(f"PRAGMA table_info({table})")}:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
        for key in ("schema", "source", *self._place):
            database.execute("UPDATE meta SET value = ? WHERE key = ?", (self._meta[key], key))
        self.records.checkpoints = set(database.execute("SELECT attempt, seq FROM checkpoints"))
        database.execute("COMMIT")

    def _check_place(self, known: Mapping[str, str]) -> None:
        """Raise ConfigError if the file is that of another node of the job: the daemon of each would take the other's
        ranks for its own. A node may get another number when the job is queued again, or another name in a new pod, but
        not both."""
        if self._place and all(known[key] != value for key, value in self._place.items()):
            raise ConfigError(
                f"history is not written: {self.path} is that of node {known['node']} ({known['hostname']}) of this job"
                f", and this is node {self._place['node']} ({self._place['hostname']}); alerts and rollback go on; set "
                "SENTINEL_STATE to a directory of its own on each node"
            )

    def flush(self, patience: float = PATIENCE_SECONDS) -> None:
        """Have new rows written in one transaction, and wait for it at most `patience` seconds: not at all where an
        earlier flush hangs, or the last one failed."""
        began = self._began
        asked = self.begin_flush()
        if not self._trouble and (began is None or time.monotonic() - began < patience):
            with contextlib.suppress(TimeoutError):
                asked.result(patience)

    def begin_flush(self) -> Future[None]:
        """Have new rows written, on this history's own thread. The returned future is done once that was tried."""
        asked: Future[None] = Future()
        with self._flushes:
            self._asked.append(asked)
            if self._began is None:
                self._began = time.monotonic()
                try:
                    threading.Thread(target=self._serve_flushes, name="sentinel-history", daemon=True).start()
                except RuntimeError as error:  # no thread is left: the next flush tries again
                    self._began, self._asked = None, []
                    self._fail(OSError(errno.EAGAIN, str(error)))
                    asked.set_result(None)
        return asked

    def _serve_flushes(self) -> None:
        while True:
            with self._flushes:
                asked, self._asked = self._asked, []
                self._began = time.monotonic() if asked else None
            if not asked:
                return
            running = [one for one in asked if one.set_running_or_notify_cancel()]
            self.write()
            for one in running:
                one.set_result(None)

    def write(self) -> None:
        """Write new rows in one transaction, however long that takes. Where that fails, keep what fits in memory for
        the next time; on a disk that is nearly full, events are written before samples."""
        with self._transaction:
            writes = self._pending.take() if not self._closed else []
            if not writes:
                return
            began = time.monotonic()
            if self._database is not None and (why := self._find_harm()):
                self._pending.put_back(writes)
                self.replace_damaged(why)
                writes = self._pending.take()
            try:
                self._commit(writes)
            except Exception as error:
                if not isinstance(error, sqlite3.Error | OSError | ConfigError):
                    log.exception("%s: a fault of our own", self.path)
                self._failing_since = self._failing_since or began
                self._give_back(error, writes)
            else:
                if time.monotonic() - began > SLOW_SECONDS:
                    self._failing_since = self._failing_since or began
                self._recover()
                self._thin()

    def _commit(self, writes: Iterable[Write]) -> None:
        """Write all or nothing, except rows that no file would take."""
        if self._database is None:
            self._database = self._connect(BUSY_SECONDS)
        unfit = []
        self._database.execute("BEGIN IMMEDIATE")
        for write in writes:
            try:
                self._database.execute(write.statement, write.values)
            except _UNFIT as error:
                log.error("%s: a row of %s is left out: %s", self.path, write.kind, error)
                unfit.append(write)
        self._database.execute("COMMIT")
        for write in unfit:
            self._pending.drop(write)
        self.bytes, self._least = self._size(), self.path.stat().st_size

    def _give_back(self, error: Exception, writes: list[Write]) -> None:
        """Handle a failed transaction. A damaged file is replaced, and written to at the next flush."""
        self._back_out()
        rest = writes
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            with contextlib.suppress(sqlite3.Error, OSError):
                self._commit([write for write in writes if write.kind in VITAL])
                rest = [write for write in writes if write.kind not in VITAL]
            self._back_out()
        self._pending.put_back(rest)
        self._fail(error)
        if is_damage(error):
            self.replace_damaged(str(error))

    def _back_out(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._database is not None and self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _fail(self, error: Exception) -> None:
        if not self._trouble:
            log.error("%s", _trouble(self.path, error))
        self._trouble = _trouble(self.path, error)
        self._failing_since = self._failing_since or time.monotonic()

    def _recover(self) -> None:
        """After a successful transaction, report that the file is written again, and what it lacks, if it could not be
        for a while."""
        dropped = self._pending.dropped - self._reported
        if self._failing_since is None and not dropped:
            return
        seconds = time.monotonic() - self._failing_since if self._failing_since is not None else 0.0
        lacks = _list_dropped(dropped)
        lacks = f"it lacks {lacks} of that time" if lacks else "what was measured meanwhile is in it"
        said = f"the history is written again, after {seconds:.0f} s; {lacks}"
        log.warning("%s: %s", self.path, said)
        self.records.add_event(*self.records.newest, "history gap", seconds=round(seconds, 1), dropped=dict(dropped))
        self._reported += dropped
        self.notes.append(said)
        if dropped["states"] and self._database is not None:
            self.records.checkpoints = set(self._database.execute("SELECT attempt, seq FROM checkpoints"))
        self._trouble, self._failing_since = "", None

    def replace_damaged(self, why: str) -> None:
        """Replace a file that cannot be used. Where that fails, `trouble` says so."""
        with self._transaction:
            try:
                self.set_aside(why)
            except ConfigError as error:
                self._trouble = str(error)
                self._failing_since = self._failing_since or time.monotonic()

    def _thin(self) -> None:
        """Thin a stretch of old steps, if a chunk has been filled since the last time."""
        if not self.records.thinning_due or self._unthinnable or self._database is None:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self.records.thinning_due = thinning.thin(self._database)
            self._database.execute("COMMIT")
        except (sqlite3.Error, zlib.error, msgspec.MsgspecError, ValueError) as error:
            # The disk is full, or a chunk is damaged: all that was written is left as it is.
            self.records.thinning_due, self._unthinnable = False, not isinstance(error, sqlite3.OperationalError)
            log.warning("%s: is not thinned: %s", self.path, error)
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")

    def _find_harm(self) -> str:
        """Return what is wrong with the file at a glance: SQLite works from its cache, and would not notice for
        hours."""
        try:
            found = self.path.stat()
            if not os.path.samestat(found, os.fstat(self._descriptor)):
                return "another file is in its place"
            if found.st_size < self._least:
                return "it was cut short"
            head = os.pread(self._descriptor, len(MAGIC), 0)
            return "file is not a database" if self._least and head != MAGIC else ""
        except OSError as error:
            return "it was deleted" if isinstance(error, FileNotFoundError) else ""

    def _size(self) -> int:
        try:
            return sum(os.stat(f"{self.path}{side}").st_size for side in ("", "-wal"))
        except OSError:
            return self.bytes

    def close(self, patience: float = CLOSING_SECONDS) -> None:
        """Write the rest and fold the write-ahead log into the file, which is then one file. Where writing fails, it is
        tried again for `patience` seconds."""
        until = time.monotonic() + patience
        if not self._transaction.acquire(timeout=max(patience, _RETRY_SECONDS)):
            log.error("%s; it is left as it is", self.trouble)
            return
        try:
            self.write()
            while self._trouble and time.monotonic() < until:
                time.sleep(_RETRY_SECONDS)
                self.write()
            self.write()  # the record of a gap that has just ended
            if self._database is not None:
                with contextlib.suppress(sqlite3.Error):  # a reader has it open: the log stays beside the file
                    self._database.execute("PRAGMA journal_mode=DELETE")
            if self._trouble:
                self._give_up_samples()
            self._closed = True
            self._disconnect()
        finally:
            self._transaction.release()

    def _give_up_samples(self) -> None:
        """Write events without samples, and that samples are missing: on a full disk this may fit, now that the
        write-ahead log is gone."""
        why, kept = self._trouble, list[Write]()
        for write in self._pending.take():
            if write.kind in VITAL:
                kept.append(write)
            else:
                self._pending.drop(write)
        lost = self._pending.dropped - self._reported
        if self._database is not None:
            seconds = time.monotonic() - self._failing_since if self._failing_since is not None else 0.0
            self._database.execute(f"PRAGMA busy_timeout={_RETRY_SECONDS * 1000:.0f}")
            self._pending.put_back(kept)
            self.records.add_event(*self.records.newest, "history gap", seconds=round(seconds, 1), dropped=dict(lost))
            self.write()
        if self._trouble:
            for write in kept:
                lost[write.kind] += write.rows
            log.error("%s%s", why, f"; it lacks {_list_dropped(lost)}" if lost else "")


def _is_passing(error: Exception, path: Path) -> bool:
    """Return whether opening a file may succeed a moment later: it is locked, the disk is full, or no descriptor is
    left."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_CANTOPEN:  # SQLite does not say why, and the file itself must not be opened and closed
        try:
            os.close(os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as why:
            return why.errno in _PASSING_ERRNO
        return os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK)
    return code in _PASSING or (isinstance(error, OSError) and error.errno in _PASSING_ERRNO)


def _list_dropped(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{rows[kind]:,} rows of {kind}" for kind in KINDS if rows.get(kind))


def _trouble(path: Path, error: Exception) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return (
        f"history is not written: {path}: {error}; alerts and rollback go on; "
        "make room there, or set SENTINEL_STATE to another local directory"
    )
