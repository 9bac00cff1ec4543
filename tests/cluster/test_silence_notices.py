"""Notices about nodes that fall silent: one line for many nodes, and each change once."""

from __future__ import annotations

from sentinel.cluster.protocol.messages import NodeState
from sentinel.cluster.protocol.silence_notices import SilenceNotices


def make_states(silent: set[int], *, left: int = -1, steps: int = 1) -> list[NodeState]:
    return [
        NodeState(
            node=node, hostname=f"host{node}", incarnation=1, applied=0, silent_seconds=0.0, attempt=0,
            step=40 + node % steps, state="left" if node == left else "silent" if node in silent else "alive",
        )
        for node in range(64)
    ]  # fmt: skip


def test_nodes_that_fall_silent_together_are_one_line_and_reported_once() -> None:
    notices = SilenceNotices()
    assert notices.describe_changes(make_states(set())) == []
    first = notices.describe_changes(make_states({5}))
    assert first == ["node 5 (host5) is silent; daemon or link is down. Last step: 40"]
    gone = {5, *range(20, 40)}
    assert notices.describe_changes(make_states(gone, steps=2)) == [
        "nodes 20 (host20), 21 (host21), 22 (host22) and 17 more are silent; their daemons or links are down. "
        "Last steps: 40 to 41"
    ]
    assert notices.describe_changes(make_states(gone)) == []
    assert notices.describe_changes(make_states({5, 20}, left=21)) == [
        "nodes 22 (host22), 23 (host23), 24 (host24) and 15 more are heard again",
        "node 21 (host21) has left",
    ]
    assert notices.describe_changes(make_states({5, 20, 22}))[0].startswith("node 22 (host22) is silent")
