"""What jobs of thousands of nodes need, tested on a small scale. `bench/cluster.py` measures the load."""

from __future__ import annotations

import pytest

from sentinel.cluster.protocol.messages import (
    MOST_NODES,
    Beat,
    CaseWords,
    NodeState,
    Pulse,
    RollbackOrder,
    decode,
    encode,
)
from sentinel.errors import ProtocolError

NODES = tuple(
    NodeState(
        node=node, hostname=f"host-{node}.cluster.local", incarnation=1 << 41, applied=1000, state="alive",
        silent_seconds=0.123456, attempt=1, step=1_000_000, ranks={str(8 * node + n): 1_000_000 for n in range(8)},
    )
    for node in range(MOST_NODES)
)  # fmt: skip


def test_a_beat_has_room_for_all_nodes_of_the_largest_job() -> None:
    beat = Beat(epoch=1, expected=MOST_NODES, nodes=NODES, digested={str(one.node): 1_000_000 for one in NODES})
    assert decode(encode(beat), Beat) == beat


def test_a_beat_has_room_for_the_words_about_an_alert_that_asks_for_a_rollback_on_all_nodes() -> None:
    words = tuple(
        CaseWords(node=node, case=f"0.{number}", done=("rolling back to step 1000000",), over=False, stops=False)
        for node in range(MOST_NODES) for number in (11, 12)
    )  # fmt: skip
    beat = Beat(epoch=1, expected=MOST_NODES, nodes=NODES, rollback=RollbackOrder(attempt=1, words=words))
    assert decode(encode(beat), Beat) == beat


def test_a_node_has_no_more_room_than_before() -> None:
    ranks = {str(rank) + "x" * 100: 1 for rank in range(4000)}
    pulse = Pulse(node=1, incarnation=1, hostname="host1", attempt=0, step=1, ranks=ranks)
    with pytest.raises(ProtocolError, match="262144 bytes"):
        decode(encode(pulse), Pulse)
