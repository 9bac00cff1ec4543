"""Thin old steps: what is far behind the newest step is kept only in part, so that a run of months stays small.

    newest 32,768 steps     whole
    to 1,048,576            of each 32 steps the first, and those with the highest loss, gradient norm and step time
    beyond                  the same, of each 512 steps

The steps of all attempts of a run are counted. A row that stays is an original step, never a mean: spikes survive, and
so does each step within 200 of an incident. What is not finite counts as the highest value. For layers, one sample in 8
times as many steps stays. Ranks keep the steps that the run keeps.
"""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from sentinel.signals import SIGNALS
from sentinel.store.layout import CHUNK_STEPS, RUN, Chunk, pack_chunk, pack_columns, unpack_chunk

LEVELS = ((32_768, 32), (1_048_576, 512))
"""How far behind the newest step each level begins, and the number of steps out of which it keeps a few."""
_LOUD = tuple(name for name, signal in SIGNALS.items() if signal.keep_highest)
GROUP = 8
"""Chunks that are replaced at a time: 2,048 raw steps."""
AROUND_INCIDENTS = 200
LAYERS_FACTOR = 8

Row = tuple[int, float, Mapping[str, float]]


def thin(database: sqlite3.Connection) -> bool:
    """Thin the oldest stretch that is due, within the caller's transaction; return False where none is due."""
    later = 0
    spans = "SELECT attempt, min(first_seq), max(last_seq) FROM chunks WHERE rank = ? GROUP BY attempt ORDER BY 1 DESC"
    for attempt, first, last in database.execute(spans, (RUN,)).fetchall():
        if _thin_attempt(database, attempt, last + later):
            return True
        later += last - first + 1
    return False


def _thin_attempt(database: sqlite3.Connection, attempt: int, newest: int) -> bool:
    """Thin the oldest stretch of an attempt that is due. `newest`: the seq that the newest step would have if the later
    attempts had continued this one."""
    for level, (behind, every) in enumerate(LEVELS):
        query = (
            "SELECT first_seq, last_seq, body FROM chunks WHERE attempt = ? AND rank = ? AND level = ? "
            "AND last_seq < ? ORDER BY first_seq LIMIT ?"
        )
        due = database.execute(query, (attempt, RUN, level, newest - behind, GROUP)).fetchall()
        if len(due) == GROUP:
            first, last = due[0][0], due[-1][1]
            whole = _around_incidents(database, attempt)
            rows = [row for *_, body in due for row in unpack_chunk(body).rows()]
            _replace(database, attempt, RUN, level, (first, last), thin_rows(rows, every, whole))
            _thin_ranks(database, attempt, level, (first, last))
            _thin_layers(database, attempt, (first, last), every * LAYERS_FACTOR, whole)
            return True
    return False


def thin_rows(rows: Iterable[Row], every: int, whole: Sequence[range] = ()) -> list[Row]:
    """Return the rows that stay, in order."""
    buckets: dict[int, list[Row]] = {}
    for row in rows:
        buckets.setdefault(row[0] // every, []).append(row)
    found: list[Row] = []
    for bucket in buckets.values():
        stay = {bucket[0][0]}
        for signal in _LOUD:
            there = [row for row in bucket if signal in row[2]]
            if there:
                stay.add(max(there, key=lambda row: _loudness(row[2][signal]))[0])
        found += [row for row in bucket if row[0] in stay or any(row[0] in span for span in whole)]
    return found


def pack_rows(rows: Sequence[Row]) -> bytes:
    """Pack rows as a chunk."""
    columns = pack_columns([row[2] for row in rows])
    seqs, times = array("q", [row[0] for row in rows]), array("d", [row[1] for row in rows])
    return pack_chunk(Chunk(seqs.tobytes(), times.tobytes(), columns))


def _loudness(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _replace(
    database: sqlite3.Connection, attempt: int, rank: int, level: int, span: tuple[int, int], rows: Sequence[Row]
) -> None:
    """Replace a rank's chunks of one level that lie in a span by rows."""
    database.execute(
        "DELETE FROM chunks WHERE attempt = ? AND rank = ? AND level = ? AND first_seq >= ? AND last_seq <= ?",
        (attempt, rank, level, *span),
    )
    for start in range(0, len(rows), CHUNK_STEPS * GROUP):
        part = rows[start : start + CHUNK_STEPS * GROUP]
        values = (attempt, rank, part[0][0], part[-1][0], pack_rows(part), level + 1)
        database.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?)", values)


def _thin_ranks(database: sqlite3.Connection, attempt: int, level: int, span: tuple[int, int]) -> None:
    """Thin the ranks to the steps that the run keeps. Their chunks may begin elsewhere: a chunk that reaches beyond the
    span waits for the next span."""
    query = (
        "SELECT rank, first_seq, body FROM chunks WHERE attempt = ? AND rank != ? AND level = ? AND last_seq <= ? "
        "ORDER BY rank, first_seq"
    )
    chunks: dict[int, list[tuple[int, bytes]]] = {}
    for rank, first, body in database.execute(query, (attempt, RUN, level, span[1])):
        chunks.setdefault(rank, []).append((first, body))
    if not chunks:
        return
    began = min(found[0][0] for found in chunks.values())
    of_run = "SELECT body FROM chunks WHERE attempt = ? AND rank = ? AND last_seq >= ? AND first_seq <= ?"
    bodies = database.execute(of_run, (attempt, RUN, began, span[1])).fetchall()
    stay = {seq for (body,) in bodies for seq in unpack_chunk(body).steps()}
    for rank, found in chunks.items():
        rows = [row for _, body in found for row in unpack_chunk(body).rows() if row[0] in stay]
        _replace(database, attempt, rank, level, (found[0][0], span[1]), rows)


def _thin_layers(
    database: sqlite3.Connection, attempt: int, span: tuple[int, int], every: int, whole: Collection[range]
) -> None:
    query = "SELECT seq FROM layers WHERE attempt = ? AND seq BETWEEN ? AND ? ORDER BY seq"
    firsts, gone = set[int](), list[tuple[int, int]]()
    for (seq,) in database.execute(query, (attempt, *span)):
        if seq // every in firsts and not any(seq in near for near in whole):
            gone.append((attempt, seq))
        firsts.add(seq // every)
    database.executemany("DELETE FROM layers WHERE attempt = ? AND seq = ?", gone)


def _around_incidents(database: sqlite3.Connection, attempt: int) -> list[range]:
    """Return the ranges of steps that are kept because of an incident."""
    found = []
    for (body,) in database.execute("SELECT body FROM incidents"):
        case = msgspec.msgpack.decode(body)
        if case.get("attempt") == attempt and isinstance(case.get("first_seq"), int):
            found.append(range(case["first_seq"] - AROUND_INCIDENTS, case["first_seq"] + AROUND_INCIDENTS + 1))
    return found
