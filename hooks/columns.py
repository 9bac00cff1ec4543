"""Records of steps, turned into the columns of a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sentinel import wire
from sentinel.hooks.readout import Record

LARGEST = 512
"""Steps in one batch. Rows are numbered by uint16."""


def batch(records: Sequence[Record], *, dropped: int, pace: wire.Pace | None) -> wire.Batch:
    """One batch of the steps of one optimizer, in their order. `pace`: None where it did not change."""
    rows: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for row, record in enumerate(records):
        for name, value in record.values.items():
            if name not in values:
                rows[name], values[name] = [], []
            rows[name].append(row)
            values[name].append(value)
    return wire.Batch(
        stream=records[0].stream,
        seqs=array("q", [record.seq for record in records]).tobytes(),
        times=array("d", [record.time for record in records]).tobytes(),
        columns={name: _column(rows[name], column, len(records)) for name, column in values.items()},
        layers=tuple(_block(record) for record in records if record.block),
        dropped=dropped,
        pace=pace,
    )


def _column(rows: list[int], values: list[float], height: int) -> wire.Column:
    present = b"" if len(rows) == height else array("H", rows).tobytes()
    return wire.Column(values=array("d", values).tobytes(), rows=present)


def _block(record: Record) -> wire.LayerBlock:
    return wire.LayerBlock(seq=record.seq, table=record.table.digest, stats=record.block, layers=record.rows)
