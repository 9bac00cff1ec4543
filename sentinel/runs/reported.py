"""What a rank's batch holds: its columns, checked and taken apart into steps."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Container

import msgspec

from sentinel import wire
from sentinel.errors import ProtocolError

FURTHEST = 1 << 53
"""Step: as `wire.parts.Integer` has it."""
MOST_STEPS = 4096
"""In one batch. The hooks send 512."""
MOST_VALUES = 600_000
"""In the columns of one batch: 512 steps of all signals, with the 1,024 of their own that users may log."""


class Reported(msgspec.Struct):
    """What one rank said of one step."""

    time: float
    values: dict[str, float]
    layers: wire.LayerBlock | None = None


def list_reported_steps(batch: wire.Batch, tables: Container[str]) -> list[tuple[int, Reported]]:
    """The steps of a batch, each with its seq. Raises ProtocolError where columns do not fit together.

    Layers of a table that is not there yet are left out: nobody has looked whether they fit.
    """
    seqs, times = wire.unpack_column("q", batch.seqs), wire.unpack_column("d", batch.times)
    if len(seqs) > MOST_STEPS:
        raise ProtocolError(f"a batch of {len(seqs)} steps, of which it may hold {MOST_STEPS}")
    if sum(len(column.values) for column in batch.columns.values()) > 8 * MOST_VALUES:
        raise ProtocolError(f"a batch of more than {MOST_VALUES} values")
    if len(seqs) != len(times):
        raise ProtocolError(f"a batch of {len(seqs)} steps with {len(times)} times")
    if not all(map(math.isfinite, times)):
        raise ProtocolError("a batch with a time that is no number")
    if seqs and not (min(seqs) >= 0 and max(seqs) <= FURTHEST):
        raise ProtocolError(f"a batch with steps {min(seqs)} to {max(seqs)}: they count from 0")
    whole: dict[str, array[float]] = {}
    partly: dict[str, tuple[array[int], array[float]]] = {}
    for name, column in batch.columns.items():
        values, rows = wire.unpack_column("d", column.values), wire.unpack_column("H", column.rows)
        if len(values) != (len(rows) if column.rows else len(seqs)) or (rows and max(rows) >= len(seqs)):
            present = len(rows) if column.rows else len(seqs)
            raise ProtocolError(f"column {name} has {len(values)} values for {present} of {len(seqs)} steps")
        if column.rows:
            partly[name] = rows, values
        else:
            whole[name] = values
    # Most columns are whole: put together by zip, at a tenth of what it costs value by value.
    if len(whole) == 1:  # the loss, in a loop that is fast
        ((name, values),) = whole.items()
        found = [Reported(time, {name: value}) for time, value in zip(times, values, strict=True)]
    else:
        rising = zip(*whole.values(), strict=True) if whole else itertools.repeat((), len(seqs))
        timed = zip(times, rising, strict=True)
        found = [Reported(time, dict(zip(whole, row, strict=True))) for time, row in timed]
    for name, (rows, values) in partly.items():
        for row, value in zip(rows, values, strict=True):
            found[row].values[name] = value
    place = {seq: row for row, seq in enumerate(seqs)} if batch.layers else {}
    for block in batch.layers:
        if block.seq in place and block.table in tables:
            found[place[block.seq]].layers = block
    return list(zip(seqs, found, strict=True))


def check_layers(block: wire.LayerBlock, layers: int) -> None:
    """Raises ProtocolError where statistics are not those of a table of so many layers: once they are taken in, whoever
    closes the step would stumble over them, and that may be another rank."""
    rows = wire.unpack_column("I", block.layers)
    values = len(rows) if rows else layers
    if any(len(column) != 4 * values for column in block.stats.values()) or max(rows, default=0) >= max(layers, 1):
        raise ProtocolError(f"layer statistics of step {block.seq} do not fit their table of {layers} layers")
