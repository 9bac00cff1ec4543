"""Reads a run's history, live or ended, without disturbing a daemon that writes it."""

from __future__ import annotations

import sqlite3
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sentinel.errors import ConfigError
from sentinel.incident_states import UNRESOLVED, present
from sentinel.steps import LayerStats, Step
from sentinel.store.layout import READABLE, RUN, SCHEMA, Chunk, unpacked, unpacked_chunk, unpacked_layers

FIRST = -(2**62)
"""Before any step; those of imported logs may be negative."""
AT_A_TIME = 16
"""Chunks: 4,096 steps."""


class Event(msgspec.Struct, frozen=True):
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


class History:
    """One history file. Raises ConfigError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
            meta = dict(self._database.execute("SELECT key, value FROM meta"))
            self._tables = {name for (name,) in self._database.execute("SELECT name FROM sqlite_master")}
        except sqlite3.Error as error:
            raise ConfigError(f"{path}: not a history that can be read ({error})") from None
        if meta.get("schema") not in READABLE:
            raise ConfigError(f"{path}: history of schema {meta.get('schema')}, this version reads {SCHEMA}")
        self.run, self.run_id, self.source = meta["run"], meta["run_id"], meta.get("source", "")

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._database.close()
        if isinstance(error, sqlite3.DatabaseError | zlib.error | msgspec.MsgspecError | UnicodeDecodeError):
            raise ConfigError(f"{self.path}: the history is damaged ({error})") from None

    def attempts(self) -> list[tuple[int, float, float | None]]:
        """(number, began, ended) of each attempt; ended is None while it runs, or where nobody saw its end."""
        return self._database.execute("SELECT number, began, ended FROM attempts ORDER BY number").fetchall()

    def hello(self, attempt: int) -> dict[str, Any]:
        """What the first rank of an attempt said of the run."""
        rows = self._database.execute("SELECT hello FROM attempts WHERE number = ?", (attempt,)).fetchall()
        found: dict[str, Any] = msgspec.msgpack.decode(rows[0][0]) if rows else {}
        return found

    def series(self, name: str, *, attempt: int = 0, rank: int = RUN) -> Series:
        """One signal over all steps that have it."""
        return _series(self._chunks(attempt, rank), (name,))[name]

    def columns(self, names: Sequence[str], *, attempt: int = 0, rank: int = RUN) -> dict[str, Series]:
        """Several signals, each over all steps that have it; those that were never seen are left out."""
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
        return sorted({entity for (entity,) in self._kept("readings", "DISTINCT entity", attempt)})

    def readings(self, name: str, device: str, *, attempt: int = 0) -> Series:
        """One signal of a device. The seqs are those of the last step before each reading; they repeat."""
        bodies = self._kept("readings", "body, entity", attempt, "ORDER BY first_time")
        return _series([unpacked_chunk(body) for body, entity in bodies if entity == device], (name,))[name]

    def layers(self, *, attempt: int = 0, after: int = -1) -> list[tuple[int, LayerStats]]:
        """(seq, statistics of all layers) of the steps after `after`, in order."""
        query = "SELECT seq, body FROM layers WHERE attempt = ? AND seq > ? ORDER BY seq"
        return [(seq, unpacked_layers(body)) for seq, body in self._database.execute(query, (attempt, after))]

    def last_seq(self, attempt: int) -> int:
        """The last step that is kept; -1 where there is none."""
        query = "SELECT max(last_seq) FROM chunks WHERE attempt = ? AND rank = ?"
        ((found,),) = self._database.execute(query, (attempt, RUN)).fetchall()
        return -1 if found is None else int(found)

    def steps(self, *, attempt: int = 0, after: int = -1) -> Iterator[Step]:
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
                    yield Step(seq, time, apart.pop(seq, {0: values}), values, layers.pop(seq, None))

    def incidents(self) -> list[dict[str, Any]]:
        """All incidents, in the order in which they fired."""
        rows = self._database.execute("SELECT body FROM incidents ORDER BY seq, id")
        cases: list[dict[str, Any]] = [msgspec.msgpack.decode(body) for (body,) in rows]
        for case in cases:
            if "state" in case:
                case["state"] = present(str(case["state"]))
        return cases

    def final_incidents(self) -> list[dict[str, Any]]:
        """All incidents of a run that has ended: each has `over`, and what fired until then is unresolved."""
        ended = ((case, UNRESOLVED if case["state"] == "firing" else case["state"]) for case in self.incidents())
        return [case | {"state": state, "over": True} for case, state in ended]

    def incident_count(self) -> int:
        """How many there were."""
        ((found,),) = self._database.execute("SELECT count(*) FROM incidents")
        return int(found)

    def events(self, kind: str | None = None) -> list[Event]:
        """What happened, in order of time."""
        rows = self._database.execute("SELECT time, attempt, seq, kind, body FROM events ORDER BY rowid")
        found = [Event(at, attempt, seq, name, msgspec.msgpack.decode(body)) for at, attempt, seq, name, body in rows]
        return [event for event in found if kind in (None, event.kind)]

    # What a daemon goes on from.

    def ranks(self, attempt: int) -> dict[int, KeptRank]:
        """The ranks of an attempt."""
        rows = self._kept("ranks", "rank, hello, process, gone", attempt)
        return {rank: KeptRank(hello, process, bool(gone)) for rank, hello, process, gone in rows}

    def tables(self, attempt: int) -> dict[str, bytes]:
        """Layer tables by digest, as they came over the wire."""
        return dict(self._kept("tables", "digest, body", attempt))

    def state(self, attempt: int) -> tuple[int, bytes] | None:
        """(seq, state) as the daemon last wrote it."""
        return next(iter(self._kept("states", "seq, body", attempt)), None)

    def checkpoints(self, attempt: int) -> list[tuple[int, bytes]]:
        """(seq, state of the rules), rising."""
        return sorted(self._kept("checkpoints", "seq, body", attempt))

    def _kept(self, table: str, columns: str, attempt: int, order: str = "") -> list[Any]:
        if table not in self._tables:  # a file from before
            return []
        query = f"SELECT {columns} FROM {table} WHERE attempt = ? {order}"
        return self._database.execute(query, (attempt,)).fetchall()

    def _chunks(self, attempt: int, rank: int, after: int = -1) -> Iterator[Chunk]:
        """Some at a time: while a query is open the write-ahead log only grows, and whoever reads may be a pager."""
        query = (
            "SELECT first_seq, body FROM chunks WHERE attempt = ? AND rank = ? AND last_seq > ? AND first_seq > ? "
            "ORDER BY first_seq LIMIT ?"
        )
        last = FIRST
        while found := self._database.execute(query, (attempt, rank, after, last, AT_A_TIME)).fetchall():
            last = found[-1][0]
            yield from (unpacked_chunk(body) for _, body in found)


def _series(chunks: Iterable[Chunk], names: Sequence[str]) -> dict[str, Series]:
    found = {name: Series(array("q"), array("d"), array("d")) for name in names}
    for chunk in chunks:
        seqs, times = unpacked("q", chunk.seqs), unpacked("d", chunk.times)
        for name in found.keys() & chunk.columns.keys():
            column, packed_rows = (bytes(part) for part in chunk.columns[name])
            series, rows = found[name], unpacked("H", packed_rows)
            series.values.extend(unpacked("d", column))
            series.seqs.extend(array("q", [seqs[row] for row in rows]) if rows else seqs)
            series.times.extend(array("d", [times[row] for row in rows]) if rows else times)
    return found
