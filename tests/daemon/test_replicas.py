"""Which layers of replicas differ, from what the ranks send."""

from __future__ import annotations

from array import array

from sentinel import wire
from sentinel.runs.replica_checks import Block, differing

TABLE = wire.LayerTable(
    digest="t", layers=tuple(wire.Layer(name=name, shape=(1,), dtype="float32") for name in ("a", "b", "c"))
)


def block(*sums: float, layers: tuple[int, ...] = ()) -> Block:
    stats = {"layer_checksum": array("f", sums).tobytes()} if sums else {}
    return TABLE, wire.LayerBlock(seq=0, table="t", stats=stats, layers=array("I", layers).tobytes())


def test_layers_that_differ_on_any_rank() -> None:
    assert differing([block(1, 2, 3), block(1, 2, 3)]) == ()
    assert differing([block(1, 2, 3), block(1, 9, 3), block(1, 2, 8)]) == ("b", "c")


def test_a_rank_that_has_fewer_layers_is_compared_by_those() -> None:
    assert differing([block(1, 2, 3), block(1, 3, layers=(0, 2))]) == ()
    assert differing([block(1, 2, 3), block(1, 4, layers=(0, 2))]) == ("c",)


def test_a_rank_that_sent_no_checksums_is_left_out() -> None:
    assert differing([block(), block(1, 2, 3)]) == ()
    assert differing([]) == ()
