"""The content of a rank's batch: its columns, checked and taken apart into steps."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Container

from sentinel import wire
from sentinel.errors import ProtocolError

FURTHEST = 1 << 53
"""The largest seq of a step: as in `wire.parts.Integer`."""
MOST_STEPS = 4096
"""Steps in one batch, at most. The hooks send 512."""
MOST_VALUES = 600_000
"""Values in the columns of one batch, at most: 512 steps of all signals, with the 1,024 that users may log."""
VALUES_AT_A_TIME = 8_192
"""Values of a batch that are made into steps together: this takes some 1 ms."""


class Reported:
    """What one rank reported about one step."""

    __slots__ = ("_columns", "_row", "layers", "time")

    def __init__(self, columns: _Columns, row: int) -> None:
        self._columns, self._row = columns, row
        self.time: float = columns.times[row]
        self.layers: wire.LayerBlock | None = None

    def take_values(self) -> dict[str, float]:
        """Return signal -> value; called once, when the step is closed."""
        return self._columns.take_row(self._row)


class _Columns:
    """The columns of a batch. Making all steps of a large batch takes 0.1 s, so a few are made at a time, when they are
    needed: in between the daemon serves others."""

    def __init__(self, batch: wire.Batch) -> None:
        """Raises ProtocolError where the columns do not fit together."""
        self.seqs, self.times = wire.unpack_column("q", batch.seqs), wire.unpack_column("d", batch.times)
        self._whole: dict[str, array[float]] = {}
        self._partly: dict[str, tuple[array[int], array[float]]] = {}
        self._made: dict[int, dict[str, float]] = {}
        """Row -> its values, for rows that are made and not taken yet."""
        steps = len(self.seqs)
        if steps > MOST_STEPS:
            raise ProtocolError(f"a batch of {steps} steps, of which it may hold {MOST_STEPS}")
        if sum(len(column.values) for column in batch.columns.values()) > 8 * MOST_VALUES:
            raise ProtocolError(f"a batch of more than {MOST_VALUES} values")
        if steps != len(self.times):
            raise ProtocolError(f"a batch of {steps} steps with {len(self.times)} times")
        if not all(map(math.isfinite, self.times)):
            raise ProtocolError("a batch with a time that is no number")
        if steps and not (min(self.seqs) >= 0 and max(self.seqs) <= FURTHEST):
            raise ProtocolError(f"a batch with steps {min(self.seqs)} to {max(self.seqs)}: they count from 0")
        for name, column in batch.columns.items():
            self._add_column(name, column)
        self._together = max(1, VALUES_AT_A_TIME // max(1, len(batch.columns)))

    def _add_column(self, name: str, column: wire.Column) -> None:
        steps, values = len(self.seqs), wire.unpack_column("d", column.values)
        if not column.rows:
            if len(values) != steps:
                raise ProtocolError(f"column {name} has {len(values)} values for {steps} of {steps} steps")
            self._whole[name] = values
            return
        rows = wire.unpack_column("H", column.rows)
        if len(values) != len(rows) or max(rows) >= steps:
            raise ProtocolError(f"column {name} has {len(values)} values for {len(rows)} of {steps} steps")
        if (numbers := rows.tolist()) != sorted(numbers):
            raise ProtocolError(f"column {name} has rows that do not rise")
        self._partly[name] = rows, values

    def take_row(self, row: int) -> dict[str, float]:
        """Return signal -> value for one step; each row can be taken once."""
        if row not in self._made:
            self._make(row - row % self._together)
        return self._made.pop(row)

    def _make(self, first: int) -> None:
        """Make the values of this row together with those of the following rows."""
        last = min(first + self._together, len(self.seqs))
        # Most columns are whole and joined by zip, at a tenth of the cost of going value by value.
        if len(self._whole) == 1:  # only the loss, as in a fast loop
            ((name, values),) = self._whole.items()
            made = [{name: value} for value in values[first:last]]
        elif self._whole:
            rising = zip(*(values[first:last] for values in self._whole.values()), strict=True)
            made = [dict(zip(self._whole, row, strict=True)) for row in rising]
        else:
            made = [{} for _ in range(first, last)]
        for name, (rows, values) in self._partly.items():
            begin, end = bisect_left(rows, first), bisect_left(rows, last)
            for row, value in zip(rows[begin:end], values[begin:end], strict=True):
                made[row - first][name] = value
        self._made.update(enumerate(made, first))


def list_reported_steps(batch: wire.Batch, tables: Container[str]) -> list[tuple[int, Reported]]:
    """Return the steps of a batch, each with its seq. Raises ProtocolError where columns do not fit together.

    Layers of a table that has not arrived are left out, as they cannot be checked against it.
    """
    columns = _Columns(batch)
    found = [Reported(columns, row) for row in range(len(columns.seqs))]
    place = {seq: row for row, seq in enumerate(columns.seqs)} if batch.layers else {}
    for block in batch.layers:
        if block.seq in place and block.table in tables:
            found[place[block.seq]].layers = block
    return list(zip(columns.seqs, found, strict=True))


def check_layers(block: wire.LayerBlock, layers: int) -> None:
    """Raise ProtocolError if statistics do not fit a table of `layers` layers. Otherwise they would fail later, when
    the step is closed, possibly while another rank is served."""
    rows = wire.unpack_column("I", block.layers)
    values = len(rows) if rows else layers
    if any(len(column) != 4 * values for column in block.stats.values()) or max(rows, default=0) >= max(layers, 1):
        raise ProtocolError(f"layer statistics of step {block.seq} do not fit their table of {layers} layers")
