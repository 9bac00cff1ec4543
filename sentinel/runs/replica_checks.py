"""Find layers that differ between ranks that hold replicas of a model, by the checksums that each rank sent."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel import wire
from sentinel.signals import SIGNALS

COMPARED = tuple(name for name, signal in SIGNALS.items() if signal.scope == "layer" and signal.compared)

Block = tuple[wire.LayerTable, wire.LayerBlock]
"""A rank's layer statistics of a step, and the table that says what their rows are."""


def differing(blocks: Sequence[Block]) -> tuple[str, ...]:
    """Return the layers that are not the same on all of these ranks, in the model's order."""
    return tuple(dict.fromkeys(name for signal in COMPARED for name in _differing_in(signal, blocks)))


def _differing_in(signal: str, blocks: Sequence[Block]) -> Sequence[str]:
    columns = [(table, block, block.stats[signal]) for table, block in blocks if signal in block.stats]
    if len({(table.digest, block.layers, column) for table, block, column in columns}) < 2:
        return ()  # nearly always: nothing has to be unpacked
    values: dict[str, set[float]] = {}
    for table, block, column in columns:
        rows = wire.unpack_column("I", block.layers) if block.layers else range(len(table.layers))
        for row, value in zip(rows, wire.unpack_column("f", column), strict=False):
            values.setdefault(table.layers[row].name, set()).add(value)
    return [name for name, different in values.items() if len(different) > 1]
