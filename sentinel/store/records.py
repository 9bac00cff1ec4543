"""Record a run: statements for its history, and samples for its chunks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sentinel.runs.steps import RunStep
from sentinel.store.layout import RUN, pack_layers
from sentinel.store.pending_writes import PendingWrites, Whose, Write

STANDING_INCIDENTS = 256
"""The newest incidents, at some 20 kB each, that a history which replaces a damaged one begins with, at most."""
_EVENT = """
INSERT INTO events SELECT ?, ?, ?, ?, ? WHERE NOT EXISTS
    (SELECT 1 FROM events WHERE attempt = ? AND kind = ? AND seq = ? AND body = ?)
"""


class RunRecords:
    """Turns what happens in a run into writes, which wait in `PendingWrites` for the next flush."""

    def __init__(self, pending: PendingWrites) -> None:
        self._pending = pending
        self._numbers = itertools.count()
        self.standing: dict[tuple[str, ...], Write] = {}
        """Rows that a history which replaces a damaged one begins with."""
        self._incidents: dict[tuple[str, str], None] = {}
        """Keys of the incidents in `standing`, the oldest first."""
        self.checkpoints: set[tuple[int, int]] = set()
        """(attempt, seq) of the checkpoints that are in the file."""
        self._implied = 0
        """The rank whose values are those of the run where no rank has values of its own."""
        self.newest = (0, -1)
        """(attempt, seq) of the newest step."""
        self.thinning_due = False
        """Whether a chunk has been filled since the file was thinned."""

    def begin_attempt(self, number: int, hello: bytes, began: float | None = None) -> None:
        """Record that an attempt began, now or at Unix seconds; `hello` as it came over the wire. States of older
        attempts are no longer needed, and deleted."""
        insert = "INSERT OR REPLACE INTO attempts VALUES (?, ?, NULL, ?)"
        row = number, time.time() if began is None else began, hello
        self._stand(("attempt",), Write("ranks", ("attempt", number), insert, row))
        for key in [key for key in self.standing if key[0] in ("rank", "table")]:
            del self.standing[key]
        for kind, table in (("states", "states"), ("states", "checkpoints"), ("ranks", "tables")):
            self._write(kind, ("former", table), f"DELETE FROM {table} WHERE attempt < ?", number)

    def end_attempt(self, number: int, ended: float | None = None) -> None:
        """Record that all ranks of an attempt are gone, since now or since a time in Unix seconds."""
        at = time.time() if ended is None else ended
        self._write("ranks", ("ended", number), "UPDATE attempts SET ended = ? WHERE number = ?", at, number)

    def add_rank(self, attempt: int, rank: int, *, process: int, hello: bytes, alone: bool = False) -> None:
        """Record that a rank arrived or came back: the attempt has not ended. `alone`: there is no other here."""
        self._implied = rank if alone else 0
        self._write("ranks", ("ended", attempt), "UPDATE attempts SET ended = NULL WHERE number = ?", attempt)
        insert = "INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, 0, ?)"
        self._stand(
            ("rank", str(rank)), Write("ranks", ("rank", attempt, rank), insert, (attempt, rank, process, hello))
        )

    def record_goodbye(self, attempt: int, rank: int) -> None:
        """Record that a rank said goodbye."""
        update = "UPDATE ranks SET gone = 1 WHERE attempt = ? AND rank = ?"
        self._write("ranks", ("gone", attempt, rank), update, attempt, rank)

    def add_layer_table(self, attempt: int, digest: str, body: bytes) -> None:
        """Record a layer table, as it came over the wire."""
        insert = "INSERT OR IGNORE INTO tables VALUES (?, ?, ?)"
        self._stand(("table", digest), Write("ranks", ("table", attempt, digest), insert, (attempt, digest, body)))

    def keep_state(self, attempt: int, seq: int, body: bytes, checkpoints: Sequence[tuple[int, bytes]]) -> None:
        """Record the state after step `seq`, from which another daemon would go on. `checkpoints`: all of them; the
        file is changed where it differs."""
        insert = "INSERT OR REPLACE INTO states VALUES (?, ?, ?)"
        self._write("states", ("state", attempt), insert, attempt, seq, body)
        wanted = {(attempt, at): state for at, state in checkpoints}
        for key in self.checkpoints - wanted.keys():
            delete = "DELETE FROM checkpoints WHERE attempt = ? AND seq = ?"
            self._write("states", ("checkpoint", *key), delete, *key)
        for key in wanted.keys() - self.checkpoints:
            insert = "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)"
            self._write("states", ("checkpoint", *key), insert, *key, wanted[key])
        self.checkpoints = set(wanted)

    def add_step(self, attempt: int, step: RunStep) -> None:
        """Record a closed step. Ranks are recorded separately only where there are several: the run's values are those
        of a rank that is alone."""
        self.newest = (attempt, step.seq)
        self._append(attempt, RUN, step.seq, step.time, step.run)
        if step.ranks != {self._implied: step.run}:
            for rank, values in step.ranks.items():
                self._append(attempt, rank, step.seq, step.time, values)
        if step.layers is not None:
            body = pack_layers(step.layers)
            insert = "INSERT OR REPLACE INTO layers VALUES (?, ?, ?)"
            self._write("layers", (attempt, step.seq), insert, attempt, step.seq, body)

    def add_reading(self, attempt: int, device: str, seq: int, time: float, values: Mapping[str, float]) -> None:
        """Record a reading of a GPU or the host after step `seq`."""
        self._append(attempt, device, seq, time, values)

    def put_incident(self, identity: str, seq: int, body: dict[str, Any]) -> None:
        """Record the present form of an incident."""
        self._put_incident("incidents", identity, seq, body)

    def put_job_incident(self, identity: str, seq: int, body: dict[str, Any]) -> None:
        """Record the present form of an incident of the job over several nodes."""
        self._put_incident("job_incidents", identity, seq, body)

    def _put_incident(self, table: str, identity: str, seq: int, body: dict[str, Any]) -> None:
        key, packed = (table, identity), msgspec.msgpack.encode(body)
        self.standing.pop(key, None)  # so that the newest is the last
        insert = f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)"
        self._stand(key, Write("incidents", key, insert, (identity, seq, packed)))

        self._incidents.pop(key, None)
        self._incidents[key] = None
        if len(self._incidents) > STANDING_INCIDENTS:
            oldest = next(iter(self._incidents))
            del self._incidents[oldest], self.standing[oldest]

    def add_event(self, attempt: int, seq: int, kind: str, **detail: Any) -> None:
        """Record something that happened once; what a rank sends again because a daemon was killed is recorded
        already."""
        body = msgspec.msgpack.encode(detail)
        key = (next(self._numbers),)  # in order: the statement recognises an event that was recorded twice
        self._write("events", key, _EVENT, time.time(), attempt, seq, kind, body, attempt, kind, seq, body)

    def mark_spans(self, progress: str) -> None:
        """Record how far spans of this run were sent."""
        self._write("events", ("spans",), "INSERT OR REPLACE INTO meta VALUES ('spans', ?)", progress)

    def _stand(self, key: tuple[str, ...], write: Write) -> None:
        """Write a row that a history must have, and keep it in `standing`."""
        self.standing[key] = write
        self._pending.add(write)

    def _write(self, kind: str, key: tuple[Any, ...], statement: str, *values: Any) -> None:
        self._pending.add(Write(kind, key, statement, values))

    def _append(self, attempt: int, whose: Whose, seq: int, time: float, values: Mapping[str, float]) -> None:
        if self._pending.append(attempt, whose, seq, time, values) and whose == RUN:
            self.thinning_due = True
