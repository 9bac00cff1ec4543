"""Reads a run's history, live or ended, without disturbing a daemon that writes it."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import time as now
from typing import Annotated, Any

import msgspec

from sentinel.diagnose.case import BY_RANK
from sentinel.errors import ConfigError, DamageError
from sentinel.runs.steps import LayerStats, RunStep
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
"""Before any step; those of imported logs may be negative."""
AT_A_TIME = 16
"""Chunks: 4,096 steps."""
MOST_UNPACKED, MOST_RATIO = 128 * 1024**2, 32
"""Bytes that a history may unpack to while it is read: so many, and so many for each packed byte. Losses, norms and
times do not pack tenfold."""
_TABLES = {"meta", "attempts", "chunks", "layers", "incidents", "events"}
"""Those of each schema. Where one is a view, it is no writer's, and may have any number of rows."""

_Step = Annotated[int, msgspec.Meta(gt=-FARTHEST, lt=FARTHEST)]
_Time = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Unix seconds, up to the year 9999."""


class _Hello(msgspec.Struct):
    """What is relied upon of an attempt's hello."""

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
    """What is relied upon of an incident. What an older version did not write has a default."""

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
    """The cases of this node that it is made of."""


class _Rollback(msgspec.Struct):
    ok: bool
    to: _Step
    at: _Step


class StoredEvent(msgspec.Struct, frozen=True):
    """Something that happened once."""

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
    """As it came over the wire."""
    process: int
    gone: bool
    """It said goodbye."""


def is_blank(path: Path) -> bool:
    """Whether a history holds no table: the disk was full as it was begun."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return database.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    except sqlite3.Error:
        return False


class History:
    """One history file. Raises ConfigError where it cannot be read: DamageError where it never will be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            meta = dict(self._database.execute("SELECT key, value FROM meta"))
            tables = self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            self._tables = {name for (name,) in tables}
        except sqlite3.Error as error:
            kind = DamageError if is_damage(error) else ConfigError
            raise kind(f"{path}: not a history that can be read ({error})") from None
        except UnicodeDecodeError as error:  # SQLite's own words may hold the damaged bytes
            raise DamageError(f"{path}: not a history that can be read ({error})") from None
        if meta.get("schema") not in READABLE:
            raise ConfigError(f"{path}: history of schema {meta.get('schema')}, this version reads {SCHEMA}")
        lacking = sorted(_TABLES - self._tables) + [key for key in ("run", "run_id") if not meta.get(key)]
        if lacking:
            raise DamageError(f"{path}: the history is damaged (it has no {', '.join(lacking)})")
        self.run, self.run_id, self.source = meta["run"], meta["run_id"], meta.get("source") or ""
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
        """(number, began, ended) of each attempt; ended is None while it runs, or if its end was not seen."""
        rows = self._database.execute("SELECT number, began, ended FROM attempts ORDER BY number").fetchall()
        return msgspec.convert(rows, list[tuple[int, _Time, _Time | None]])

    def lifetime(self, *, over: bool) -> tuple[float, float]:
        """(when it began in Unix seconds, seconds that it took): from the first attach to the last rank's goodbye, over
        all attempts with what is between them. Every command, the page and the report show this figure.

        `over`: nobody watches it any more. Where its end was not seen, it took to the last that is known of it.
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
        return max([*times, *(event.time for event in self.events() if event.attempt == attempt)], default=0.0)

    def facts(self, attempt: int) -> dict[str, Any]:
        """What the first rank of an attempt said of the run, and as what it has been judged since."""
        judged = [event.detail["judged_as"] for event in self.events("judged") if event.attempt == attempt]
        return {**self._hello(attempt).facts, **({"judged_as": judged[-1]} if judged else {})}

    def step_offset(self, attempt: int) -> int:
        """The user's step of seq 0."""
        return self._hello(attempt).step_offset

    def _hello(self, attempt: int) -> _Hello:
        rows = self._database.execute("SELECT hello FROM attempts WHERE number = ?", (attempt,)).fetchall()
        return next((msgspec.msgpack.decode(hello, type=_Hello) for (hello,) in rows if hello), _Hello())

    def series(self, name: str, *, attempt: int = 0, rank: int = RUN) -> Series:
        """One signal over all steps that have it."""
        return _series(self._chunks(attempt, rank), (name,))[name]

    def columns(self, names: Sequence[str], *, attempt: int = 0, rank: int = RUN) -> dict[str, Series]:
        """Several signals, each over all steps that have it; signals never seen are left out."""
        found = _series(self._chunks(attempt, rank), names)
        return {name: series for name, series in found.items() if series.seqs}

    def rows(self, *, attempt: int = 0, rank: int = RUN) -> Iterator[tuple[int, float, dict[str, float]]]:
        """(seq, time, values by signal) of each step that is kept, in order."""
        for chunk in self._chunks(attempt, rank):
            yield from chunk.rows()

    def signals(self, *, attempt: int = 0, rank: int = RUN) -> list[str]:
        """Names of the signals that were seen."""
        return list(dict.fromkeys(name for chunk in self._chunks(attempt, rank) for name in chunk.columns))

    def devices(self, *, attempt: int = 0) -> list[str]:
        """What was read by the clock: `gpu 0`, `node trainer-3`."""
        return sorted({entity for (entity,) in self._read_rows("readings", "DISTINCT entity", attempt)})

    def readings(self, name: str, device: str, *, attempt: int = 0) -> Series:
        """One signal of a device. The seqs are those of the last step before each reading; they repeat."""
        bodies = self._read_rows("readings", "body, entity", attempt, "ORDER BY first_time")
        found = msgspec.convert(bodies, list[tuple[bytes, str]])
        return _series([self._chunk(body) for body, entity in found if entity == device], (name,))[name]

    def layers(self, *, attempt: int = 0, after: int = -1) -> list[tuple[int, LayerStats]]:
        """(seq, statistics of all layers) of the steps after `after`, in order."""
        query = "SELECT seq, body FROM layers WHERE attempt = ? AND seq > ? ORDER BY seq"
        found = []
        for row in self._database.execute(query, (attempt, after)):
            seq, body = msgspec.convert(row, tuple[_Step, bytes])
            layers = unpack_layers(body)
            self._count(len(body), sum(map(len, layers.stats.values())) * 4)
            found.append((seq, layers))
        return found

    def last_seq(self, attempt: int) -> int:
        """The last step that is kept; -1 where there is none."""
        query = "SELECT max(last_seq) FROM chunks WHERE attempt = ? AND rank = ?"
        ((found,),) = self._database.execute(query, (attempt, RUN)).fetchall()
        return -1 if found is None else int(found)

    def steps(self, *, attempt: int = 0, after: int = -1) -> Iterator[RunStep]:
        """The closed steps after `after`, in order, as they were judged: with ranks and layers."""
        layers = dict(self.layers(attempt=attempt, after=after))
        apart: dict[int, dict[int, dict[str, float]]] = {}
        query = "SELECT DISTINCT rank FROM chunks WHERE attempt = ? AND rank != ?"
        for (rank,) in self._database.execute(query, (attempt, RUN)).fetchall():
            for chunk in self._chunks(attempt, rank, after):
                for seq, _, values in chunk.rows():
                    apart.setdefault(seq, {})[rank] = values
        for chunk in self._chunks(attempt, RUN, after):
            for seq, time, values in chunk.rows():
                if seq > after:
                    yield RunStep(seq, time, apart.pop(seq, {0: values}), values, layers.pop(seq, None))

    def incidents(self) -> list[dict[str, Any]]:
        """All incidents of this node, in the order in which they fired."""
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
        """All incidents of a run that has ended: each has `over`, and what fired until then is unresolved. Of a job
        over several nodes whose coordinator was here, the job's, with the evidence of this node."""
        own = {case["id"]: case for case in self.incidents()}
        job = self._read_incidents("job_incidents", _JobIncident) if "job_incidents" in self._tables else []
        for case in job:
            for part in (own.pop(identity, {}) for identity in case["own"]):
                case.update({name: _read_by_rank(case, name) | _read_by_rank(part, name) for name in BY_RANK})
        cases = sorted([*own.values(), *job], key=lambda case: (case["step"], case["id"]))
        ended = ((case, UNRESOLVED if case["state"] == "firing" else case["state"]) for case in cases)
        return [case | {"state": state, "over": True} for case, state in ended]

    def incident_count(self) -> int:
        """How many there were."""
        ((found,),) = self._database.execute("SELECT count(*) FROM incidents")
        return int(found)

    def events(self, kind: str | None = None) -> list[StoredEvent]:
        """What happened, in order of time."""
        rows = self._database.execute("SELECT time, attempt, seq, kind, body FROM events ORDER BY rowid")
        found = msgspec.convert(rows.fetchall(), list[tuple[_Time, int, _Step, str, bytes]])
        return [
            StoredEvent(at, attempt, seq, name, msgspec.msgpack.decode(body, type=dict[str, Any]))
            for at, attempt, seq, name, body in found
            if kind in (None, name)
        ]

    def events_after(self, row: int, limit: int) -> list[tuple[int, StoredEvent]]:
        """(row, event) of the first so many that came after a row, in order of time."""
        query = "SELECT rowid, time, attempt, seq, kind, body FROM events WHERE rowid > ? ORDER BY rowid LIMIT ?"
        found = msgspec.convert(
            self._database.execute(query, (row, limit)).fetchall(), list[tuple[int, _Time, int, _Step, str, bytes]]
        )
        return [
            (row, StoredEvent(at, attempt, seq, name, msgspec.msgpack.decode(body, type=dict[str, Any])))
            for row, at, attempt, seq, name, body in found
        ]

    def span_mark(self) -> str:
        """How far spans of this run were sent, as `Store.mark_spans` was told; empty: none were."""
        found = self._database.execute("SELECT value FROM meta WHERE key = 'spans'").fetchone()
        return str(found[0]) if found else ""

    def rollbacks(self) -> list[tuple[int, int, int]]:
        """(attempt, seq it went back to, seq it came from) of each rollback that was carried out, in order of time."""
        found = [(event.attempt, msgspec.convert(event.detail, _Rollback)) for event in self.events("rollback")]
        return [(attempt, one.to, one.at) for attempt, one in found if one.ok]

    # What a daemon goes on from.

    def ranks(self, attempt: int) -> dict[int, KeptRank]:
        """The ranks of an attempt."""
        rows = self._read_rows("ranks", "rank, hello, process, gone", attempt)
        return {rank: KeptRank(hello, process, bool(gone)) for rank, hello, process, gone in rows}

    def tables(self, attempt: int) -> dict[str, bytes]:
        """Layer tables by digest, as they came over the wire."""
        return dict(self._read_rows("tables", "digest, body", attempt))

    def state(self, attempt: int) -> tuple[int, bytes] | None:
        """(seq, state) as the daemon last wrote it."""
        return next(iter(self._read_rows("states", "seq, body", attempt)), None)

    def checkpoints(self, attempt: int) -> list[tuple[int, bytes]]:
        """(seq, state of the rules), rising."""
        return sorted(self._read_rows("checkpoints", "seq, body", attempt))

    def _read_rows(self, table: str, columns: str, attempt: int, order: str = "") -> list[Any]:
        if table not in self._tables:  # a file from before
            return []
        query = f"SELECT {columns} FROM {table} WHERE attempt = ? {order}"
        return self._database.execute(query, (attempt,)).fetchall()

    def _chunks(self, attempt: int, rank: int, after: int = -1) -> Iterator[Chunk]:
        """Read some at a time: while a query is open the write-ahead log only grows, and the reader may be slow."""
        query = (
            "SELECT first_seq, body FROM chunks WHERE attempt = ? AND rank = ? AND last_seq > ? AND first_seq > ? "
            "ORDER BY first_seq LIMIT ?"
        )
        last = FIRST
        while found := self._database.execute(query, (attempt, rank, after, last, AT_A_TIME)).fetchall():
            last = found[-1][0]
            yield from (self._chunk(body) for _, body in msgspec.convert(found, list[tuple[_Step, bytes]]))

    def _chunk(self, body: bytes) -> Chunk:
        chunk = unpack_chunk(body)
        self._count(len(body), sum(len(values) + len(at) for values, at in chunk.columns.values()))
        return chunk

    def _count(self, packed: int, unpacked: int) -> None:
        """Raises Damaged where the file unpacks to far more than runs do."""
        self._unpackable += MOST_RATIO * packed - unpacked
        if self._unpackable < 0:
            raise Damaged(f"it unpacks to far more than its {self.path.stat().st_size} bytes can be of a run")


def _read_by_rank(case: dict[str, Any], name: str) -> dict[str, Any]:
    return msgspec.convert(case.get(name, {}), dict[str, Any])


def _series(chunks: Iterable[Chunk], names: Sequence[str]) -> dict[str, Series]:
    found = {name: Series(array("q"), array("d"), array("d")) for name in names}
    for chunk in chunks:
        seqs, times = unpack_column("q", chunk.seqs), unpack_column("d", chunk.times)
        for name in found.keys() & chunk.columns.keys():
            (column, at), series = chunk.columns[name], found[name]
            rows = unpack_column("H", at) if at else None
            series.values.frombytes(column)
            series.seqs.extend(seqs if rows is None else array("q", [seqs[row] for row in rows]))
            series.times.extend(times if rows is None else array("d", [times[row] for row in rows]))
    return found
