"""Which layers are not the same on ranks that hold replicas of a model, by the checksums that each rank sent."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel import wire

CHECKSUM = "replica_checksum"
LAYER_CHECKSUM = "layer_checksum"

Block = tuple[wire.LayerTable, wire.LayerBlock]
"""A rank's layer statistics of a step, and what their rows are."""


def differing(blocks: Sequence[Block]) -> tuple[str, ...]:
    """Layers whose checksums are not the same on all of these ranks, in the model's order."""
    columns = [(table, block, block.stats[LAYER_CHECKSUM]) for table, block in blocks if LAYER_CHECKSUM in block.stats]
    if len({(table.digest, block.layers, column) for table, block, column in columns}) < 2:
        return ()  # as nearly always: nothing was unpacked
    sums: dict[str, set[float]] = {}
    for table, block, column in columns:
        rows = wire.packed("I", block.layers) if block.layers else range(len(table.layers))
        for row, value in zip(rows, wire.packed("f", column), strict=False):
            sums.setdefault(table.layers[row].name, set()).add(value)
    return tuple(name for name, values in sums.items() if len(values) > 1)
