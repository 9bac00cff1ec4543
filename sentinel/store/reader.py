"""Read a run's history, live or ended, without disturbing a daemon that writes it."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from time import time as now
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from sentinel.diagnose.case import BY_RANK
from sentinel.errors import ConfigError, DamageError
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import thinning
from sentinel.store.layout import (
    FARTHEST,
    READABLE,
    RUN,
    SCHEMA,
    Chunk,
    Damaged,
    is_damage,
    unpack_chunk,
    unpack_column,
    unpack_layers,
)
from sentinel.text import UNRESOLVED, present

FIRST = -(2**62)
"""A seq before any step; steps of imported logs may be negative."""
AT_A_TIME = 16
"""Chunks that are read at a time: 4,096 steps."""
MOST_UNPACKED, MOST_RATIO = 128 * 1024**2, 32
"""Bytes that a history may unpack to while it is read: so many, plus so many for each packed byte. Losses, norms and
times do not pack tenfold."""
LOCK_SECONDS = 5.0
"""Seconds for which a reader waits for another program's lock."""
_TABLES = {"meta", "attempts", "chunks", "layers", "incidents", "events"}
"""Tables of every schema. A file with a view in place of one was not written by Sentinel, and may have any number of
rows."""

Row = TypeVar("Row")
_Step = Annotated[int, msgspec.Meta(gt=-FARTHEST, lt=FARTHEST)]
_Level = Annotated[int, msgspec.Meta(ge=0, le=len(thinning.LEVELS))]
_Time = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Unix seconds, up to the year 9999."""


class _Hello(msgspec.Struct):
    """The fields of an attempt's hello that are relied upon."""

    step_offset: _Step = 0
    facts: dict[str, Any] = {}


class _Diagnosis(msgspec.Struct):
    cause: str = ""
    confidence: str = "none"
    evidence: list[str] = []
    remedy: str = ""
    missing: list[str] = []
    confirm: str = ""


class _Member(msgspec.Struct):
    scope: str
    name: str
    first_step: _Step


class _Layer(msgspec.Struct):
    name: str
    norm: float = math.nan
    usual: float = math.nan
    nonfinite: int = 0


class _Incident(msgspec.Struct):
    """The fields of an incident that are relied upon. Those that an older version did not write have a default."""

    id: str = ""
    run: str = ""
    run_id: str = ""
    attempt: int = 0
    alert: str = ""
    severity: str = ""
    state: str = ""
    first_step: _Step = 0
    step: _Step = 0
    resolved_step: _Step | None = None
    time: _Time = 0.0
    members: list[_Member] = []
    summary: str = ""
    runbook: str = ""
    diagnosis: _Diagnosis = msgspec.field(default_factory=_Diagnosis)
    layers: list[_Layer] = []
    stacks: dict[str, str] = {}
    done: list[str] = []
    leaves: str = ""
    silenced: str = ""


class _JobIncident(_Incident):
    own: list[str] = []
    """Ids of the cases of this node that it consists of."""


class _Rollback(msgspec.Struct):
    ok: bool
    to: _Step
    at: _Step


class StoredEvent(msgspec.Struct, frozen=True):
    """An event that happened once."""

    time: float
    attempt: int
    seq: int
    kind: str
    detail: dict[str, Any]


class Series(msgspec.Struct, frozen=True):
    """One signal of the run or a rank, in order of steps."""

    seqs: array[int]
    times: array[float]
    values: array[float]


class KeptRank(msgspec.Struct, frozen=True):
    """A rank as the last daemon knew it."""

    hello: bytes
    """The hello as it came over the wire."""
    process: int
    gone: bool
    """Whether it said goodbye."""


def is_blank(path: Path, *, patience: float = LOCK_SECONDS) -> bool:
    """Return whether a history has no table: the disk was full when it was begun. `patience`: as for `History`."""
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=patience)) as database:
            return database.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    except sqlite3.Error:
        return False


class History:
    """One history file. Raises ConfigError where it cannot be read: DamageError where it never will be.

    `patience`: seconds to wait where another program has locked the file.
    """

    def __init__(self, path: Path, *, patience: float = LOCK_SECONDS) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=patience)
            meta = dict(self._database.execute("SELECT key, value FROM meta"))
            tables = self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self._tables = {name for (name,) in tables}
        except sqlite3.Error as error:
            kind = DamageError if is_damage(error) else ConfigError
            raise kind(f"{path}: not a history that can be read ({error})") from None
        except UnicodeDecodeError as error:  # SQLite's message may hold the damaged bytes
            raise DamageError(f"{path}: not a history that can be read ({error})") from None
        if meta.get("schema") not in READABLE:
            raise ConfigError(f"{path}: history of schema {meta.get('schema')}, this version reads {SCHEMA}")
        lacking = sorted(_TABLES - self._tables) + [key for key in ("run", "run_id") if not meta.get(key)]
        if lacking:
            raise DamageError(f"{path}: the history is damaged (it has no {', '.join(lacking)})")
        self.run, self.run_id, self.source = meta["run"], meta["run_id"], meta.get("source") or ""
        node = str(meta.get("node", ""))
        self.node = int(node) if node.isdecimal() and len(node) < 10 else None
        """The node whose history this is, in a job over several nodes."""
        self._unpackable = MOST_UNPACKED

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._database.close()
        if isinstance(error, sqlite3.OperationalError) and not is_damage(error):
            raise ConfigError(f"{self.path}: the history cannot be read now ({error})") from None
        if isinstance(error, sqlite3.DatabaseError | zlib.error | msgspec.MsgspecError | UnicodeDecodeError | Damaged):
            raise DamageError(f"{self.path}: the history is damaged ({error})") from None

    def attempts(self) -> list[tuple[int, float, float | None]]:
        """Return (number, began, ended) of each attempt; ended is None while it runs, or if its end was not seen."""
        rows = self._database.execute("SELECT number, began, ended FROM attempts ORDER BY number").fetchall()
        return msgspec.convert(rows, list[tuple[int, _Time, _Time | None]])

    def lifetime(self, *, over: bool) -> tuple[float, float]:
        """Return (when the run began in Unix seconds, its length in seconds): from the first attach to the last rank's
        goodbye, over all attempts and the gaps between them. Every command, the page and the report show this figure.

        `over`: it is no longer watched. Where its end was not seen, it counts up to the last time that is known of it.
        """
        attempts = self.attempts()
        if not attempts:
            return 0.0, 0.0
        (number, _, ended), began = attempts[-1], attempts[0][1]
        if ended is None:
            ended = self._find_last_time(number) if over else now()
        return began, max(ended - began, 0.0)

    def _find_last_time(self, attempt: int) -> float:
        query = "SELECT body FROM chunks WHERE attempt = ? AND rank = ? ORDER BY last_seq DESC LIMIT 1"
        bodies = msgspec.convert(self._database.execute(query, (attempt, RUN)).fetchall(), list[tuple[bytes]])
        times = [moment for (body,) in bodies for moment in unpack_column("d", self._chunk(body).times)]
        query = "SELECT max(time) FROM events WHERE attempt = ? GROUP BY attempt"
        found = msgspec.convert(self._database.execute(query, (attempt,)).fetchall(), list[tuple[_Time]])
        return max([*times, *(moment for (moment,) in found)], default=0.0)

    def facts(self, attempt: int) -> dict[str, Any]:
        """Return the facts from the hello of an attempt's first rank, and what kind of run it has been judged as
        since."""
        judged = [event.detail["judged_as"] for event in self.events("judged") if event.attempt == attempt]
        return {**self._hello(attempt).facts, **({"judged_as": judged[-1]} if judged else {})}

    def step_offset(self, attempt: int) -> int:
        """Return the user's step of seq 0."""
        return self._hello(attempt).step_offset

    def _hello(self, attempt: int) -> _Hello:
        rows = self._database.execute("SELECT hello FROM attempts WHERE number = ?", (attempt,)).fetchall()
        return next((msgspec.msgpack.decode(hello, type=_Hello) for (hello,) in rows if hello), _Hello())

    def series(self, name: str, *, attempt: int = 0, rank: int = RUN) -> Series:
        """Return one signal over all steps that have it."""
        return _series(self._chunks(attempt, rank), (name,))[name]

    def columns(self, names: Sequence[str], *, attempt: int = 0, rank: int = RUN, every: int = 1) -> dict[str, Series]:
        """Return several signals, each over all steps that have it; signals never seen are left out. `every`: only the
        first of so many steps counts."""
        found = _series(self._chunks(attempt, rank), names, every)
        return {name: series for name, series in found.items() if series.seqs}

    def rows(self, *, attempt: int = 0, rank: int = RUN) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Yield (seq, time, values by signal) of each step that is kept, in order."""
        for chunk in self._chunks(attempt, rank):
            yield from chunk.rows()

    def signals(self, *, attempt: int = 0, rank: int = RUN) -> list[str]:
        """Return the names of the signals that were seen."""
        return list(dict.fromkeys(name for chunk in self._chunks(attempt, rank) for name in chunk.columns))

    def devices(self, *, attempt: int = 0) -> list[str]:
        """Return the devices that were read by the clock: `gpu 0`, `node trainer-3`."""
        return sorted({entity for (entity,) in self._read_rows("readings", "DISTINCT entity", attempt)})

    def readings(self, names: Sequence[str], device: str, *, attempt: int = 0) -> dict[str, Series]:
        """Return several signals of a device; signals never read are left out. The seqs are those of the last step
        before each reading; they repeat."""
        found = _series(self._readings(attempt, device), names)
        return {name: series for name, series in found.items() if series.seqs}

    def _readings(self, attempt: int, device: str) -> Iterator[Chunk]:
        query = (
            "SELECT first_time, body FROM readings WHERE attempt = ? AND entity = ? AND first_time > ? "
            "ORDER BY first_time LIMIT ?"
        )
        last = -math.inf
        while found := self._database.execute(query, (attempt, device, last, AT_A_TIME)).fetchall():
            last = found[-1][0]
            yield from (self._chunk(body) for _, body in msgspec.convert(found, list[tuple[float, bytes]]))

    def layers(self, *, attempt: int = 0, after: int = -1) -> list[tuple[int, LayerStats]]:
        """Return (seq, statistics of all layers) of the steps after `after`, in order."""
        return list(self._layers(attempt, after))

    def _layers(self, attempt: int, after: int) -> Iterator[tuple[int, LayerStats]]:
        query = "SELECT seq, body FROM layers WHERE attempt = ? AND seq > ? ORDER BY seq LIMIT ?"
        while found := self._database.execute(query, (attempt, after, AT_A_TIME)).fetchall():
            for after, body in msgspec.convert(found, list[tuple[_Step, bytes]]):
                layers = unpack_layers(body)
                self._count(len(body), sum(map(len, layers.stats.values())) * 4)
                yield after, layers

    def find_whole(self, attempt: int) -> int:
        """Return the seq from which on all steps are kept, as of older ones only some are; `FIRST` if all are."""
        firsts = self._find_levels(attempt)
        return firsts.get(0, FIRST) if firsts.keys() - {0} else FIRST

    def find_spacing(self, attempt: int) -> int:
        """Return the number of steps out of which the first is kept whatever its values, where most are not: of the
        others the highest values are kept, and what is usual is found from the first ones. 1: all are kept."""
        level = max(self._find_levels(attempt), default=0)
        return thinning.LEVELS[level - 1][1] if level else 1

    def _find_levels(self, attempt: int) -> dict[int, int]:
        """Return the first seq of each level of thinning."""
        if "level" not in {row[1] for row in self._database.execute("PRAGMA table_info(chunks)")}:
            return {}  # of a version that thinned nothing
        query = "SELECT level, min(first_seq) FROM chunks WHERE attempt = ? AND rank = ? GROUP BY level"
        found = self._database.execute(query, (attempt, RUN)).fetchall()
        return dict(msgspec.convert(found, list[tuple[_Level, _Step]]))

    def last_seq(self, attempt: int) -> int:
        """Return the seq of the last step that is kept; -1 where there is none."""
        query = "SELECT max(last_seq) FROM chunks WHERE attempt = ? AND rank = ?"
        ((found,),) = self._database.execute(query, (attempt, RUN)).fetchall()
        return -1 if found is None else int(found)

    def steps(self, *, attempt: int = 0, after: int = -1) -> Iterator[RunStep]:
        """Yield the closed steps after `after`, in order, as they were judged: with ranks and layers. A few chunks of
        each rank are in memory at a time."""
        layers = _Beside(self._layers(attempt, after))
        query = "SELECT DISTINCT rank FROM chunks WHERE attempt = ? AND rank != ?"
        numbers = [rank for (rank,) in self._database.execute(query, (attempt, RUN)).fetchall()]
        ranks = {rank: _Beside(self._values(attempt, rank, after)) for rank in numbers}
        implied = self._find_implied(attempt)
        for chunk in self._chunks(attempt, RUN, after):
            for seq, time, values in chunk.rows():
                if seq > after:
                    reported = {rank: rows.take(seq) for rank, rows in ranks.items()}
                    apart = {rank: own for rank, own in reported.items() if own is not None}
                    yield RunStep(seq, time, apart or {implied: values}, values, layers.take(seq))

    def _values(self, attempt: int, rank: int, after: int) -> Iterator[tuple[int, dict[str, float]]]:
        return ((seq, values) for chunk in self._chunks(attempt, rank, after) for seq, _, values in chunk.rows())

    def incidents(self) -> list[dict[str, Any]]:
        """Return all incidents of this node, in the order in which they fired."""
        return self._read_incidents("incidents", _Incident)

    def _read_incidents(self, table: str, kind: type[_Incident]) -> list[dict[str, Any]]:
        rows = self._database.execute(f"SELECT body FROM {table} ORDER BY seq, id")
        cases = []
        for (body,) in msgspec.convert(rows.fetchall(), list[tuple[bytes]]):
            case = msgspec.msgpack.decode(body, type=dict[str, Any])
            whole = msgspec.to_builtins(msgspec.convert(case, kind))
            cases.append(whole | case | {"diagnosis": whole["diagnosis"], "layers": whole["layers"]})
            cases[-1]["state"] = present(whole["state"])
        return cases

    def final_incidents(self) -> list[dict[str, Any]]:
        """Return all incidents of a run that has ended: each has `over`, and those still firing then are unresolved.
        For a job over several nodes whose coordinator was here, the job's incidents, with the evidence of this node."""
        own = {case["id"]: case for case in self.incidents()}
        job = self._read_incidents("job_incidents", _JobIncident) if "job_incidents" in self._tables else []
        for case in job:
            for part in (own.pop(identity, {}) for identity in case["own"]):
                case.update({name: _read_by_rank(case, name) | _read_by_rank(part, name) for name in BY_RANK})
        cases = sorted([*own.values(), *job], key=lambda case: (case["step"], case["id"]))
        ended = ((case, UNRESOLVED if case["state"] == "firing" else case["state"]) for case in cases)
        return [case | {"state": state, "over": True} for case, state in ended]

    def incident_count(self) -> int:
        """Return the number of incidents."""
        ((found,),) = self._database.execute("SELECT count(*) FROM incidents")
        return int(found)

    def events(self, *kinds: str) -> list[StoredEvent]:
        """Return the events of these kinds, or all, in order of time. Of a long run there are many: a snapshot of a
        rank is one."""
        which = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        rows = self._database.execute(
            f"SELECT time, attempt, seq, kind, body FROM events {which} ORDER BY rowid", kinds
        )
        found = msgspec.convert(rows.fetchall(), list[tuple[_Time, int, _Step, str, bytes]])
        return [
            StoredEvent(at, attempt, seq, name, msgspec.msgpack.decode(body, type=dict[str, Any]))
            for at, attempt, seq, name, body in found
        ]

    def events_after(self, row: int, limit: int) -> list[tuple[int, StoredEvent]]:
        """Return (row, event) of the first `limit` events that came after a row, in order of time."""
        query = "SELECT rowid, time, attempt, seq, kind, body FROM events WHERE rowid > ? ORDER BY rowid LIMIT ?"
        found = msgspec.convert(
            self._database.execute(query, (row, limit)).fetchall(), list[tuple[int, _Time, int, _Step, str, bytes]]
        )
        return [
            (row, StoredEvent(at, attempt, seq, name, msgspec.msgpack.decode(body, type=dict[str, Any])))
            for row, at, attempt, seq, name, body in found
        ]

    def span_mark(self) -> str:
        """Return how far spans of this run were sent, as recorded by `RunRecords.mark_spans`; empty: none were sent."""
        found = self._database.execute("SELECT value FROM meta WHERE key = 'spans'").fetchone()
        return str(found[0]) if found else ""

    def rollbacks(self) -> list[tuple[int, int, int]]:
        """Return (attempt, seq it went back to, seq it came from) of each rollback that was carried out, in order of
        time."""
        found = [(event.attempt, msgspec.convert(event.detail, _Rollback)) for event in self.events("rollback")]
        return [(attempt, one.to, one.at) for attempt, one in found if one.ok]

    # What a restarted daemon goes on from.

    def ranks(self, attempt: int) -> dict[int, KeptRank]:
        """Return the ranks of an attempt."""
        rows = self._read_rows("ranks", "rank, hello, process, gone", attempt)
        return {rank: KeptRank(hello, process, bool(gone)) for rank, hello, process, gone in rows}

    def tables(self, attempt: int) -> dict[str, bytes]:
        """Return layer tables by digest, as they came over the wire."""
        return dict(self._read_rows("tables", "digest, body", attempt))

    def state(self, attempt: int) -> tuple[int, bytes] | None:
        """Return (seq, state) as the daemon last wrote it; None where there is none."""
        return next(iter(self._read_rows("states", "seq, body", attempt)), None)

    def checkpoints(self, attempt: int) -> list[tuple[int, bytes]]:
        """Return (seq, state of the rules), rising."""
        return sorted(self._read_rows("checkpoints", "seq, body", attempt))

    def _read_rows(self, table: str, columns: str, attempt: int, order: str = "") -> list[Any]:
        if table not in self._tables:  # a file of an older version
            return []
        query = f"SELECT {columns} FROM {table} WHERE attempt = ? {order}"
        return self._database.execute(query, (attempt,)).fetchall()

    def _find_implied(self, attempt: int) -> int:
        """Return the rank whose values are those of the run where no rank has values of its own."""
        ranks = self._read_rows("ranks", "rank", attempt, "LIMIT 2")
        return int(ranks[0][0]) if len(ranks) == 1 else 0

    def _keeps_apart(self, attempt: int, rank: int) -> bool:
        """Return whether any values of this rank, or of the run, are kept under its number."""
        query = "SELECT 1 FROM chunks WHERE attempt = ? AND rank = ? LIMIT 1"
        return self._database.execute(query, (attempt, rank)).fetchone() is not None

    def _chunks(self, attempt: int, rank: int, after: int = -1) -> Iterator[Chunk]:
        """Read a few chunks at a time: while a query is open the write-ahead log only grows, and the reader may be
        slow."""
        query = (
            "SELECT first_seq, body FROM chunks WHERE attempt = ? AND rank = ? AND last_seq > ? AND first_seq > ? "
            "ORDER BY first_seq LIMIT ?"
        )
        if rank == self._find_implied(attempt) and not self._keeps_apart(attempt, rank):
            rank = RUN
        last = FIRST
        while found := self._database.execute(query, (attempt, rank, after, last, AT_A_TIME)).fetchall():
            last = found[-1][0]
            yield from (self._chunk(body) for _, body in msgspec.convert(found, list[tuple[_Step, bytes]]))

    def _chunk(self, body: bytes) -> Chunk:
        chunk = unpack_chunk(body)
        self._count(len(body), sum(len(values) + len(at) for values, at in chunk.columns.values()))
        return chunk

    def _count(self, packed: int, unpacked: int) -> None:
        """Raise Damaged where the file unpacks to far more than a run's history does."""
        self._unpackable += MOST_RATIO * packed - unpacked
        if self._unpackable < 0:
            raise Damaged(f"it unpacks to far more than its {self.path.stat().st_size} bytes can be of a run")


class _Beside(Generic[Row]):
    """Rows in order of steps, read as far as the steps that they stand beside."""

    def __init__(self, rows: Iterator[tuple[int, Row]]) -> None:
        self._rows, self._head = rows, next(rows, None)

    def take(self, seq: int) -> Row | None:
        """Return the row of this step, and leave those before it behind."""
        while self._head is not None and self._head[0] < seq:
            self._head = next(self._rows, None)
        return self._head[1] if self._head is not None and self._head[0] == seq else None


def _read_by_rank(case: dict[str, Any], name: str) -> dict[str, Any]:
    return msgspec.convert(case.get(name, {}), dict[str, Any])


def _series(chunks: Iterable[Chunk], names: Sequence[str], every: int = 1) -> dict[str, Series]:
    """Return the series of these names; with `every`, only from rows that are the first of so many steps."""
    found = {name: Series(array("q"), array("d"), array("d")) for name in names}
    bucket: int | None = None
    for chunk in chunks:
        seqs, times = unpack_column("q", chunk.seqs), unpack_column("d", chunk.times)
        firsts = [bucket != (bucket := seq // every) for seq in seqs] if every > 1 else []
        for name in found.keys() & chunk.columns.keys():
            (column, at), series = chunk.columns[name], found[name]
            rows = unpack_column("H", at) if at else range(len(seqs))
            chosen = [firsts[row] for row in rows] if firsts else None
            series.values.extend(_choose(unpack_column("d", column), chosen))
            series.seqs.extend(_choose(array("q", [seqs[row] for row in rows]) if at else seqs, chosen))
            series.times.extend(_choose(array("d", [times[row] for row in rows]) if at else times, chosen))
    return found


def _choose(items: array[Any], chosen: Sequence[bool] | None) -> array[Any]:
    return items if chosen is None else array(items.typecode, compress(items, chosen))
