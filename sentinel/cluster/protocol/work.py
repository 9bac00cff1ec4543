"""Exchanges which nodes have a rank at work: ranks that wait for it, on whatever node, do not hang."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sentinel.cluster.protocol.messages import NodeState


def find_work_elsewhere(states: Iterable[NodeState], node: int, attempt: int, heard: float) -> tuple[float, float]:
    """Return when a rank of another node was last seen at work, -inf if none is, and the longest patience that one is
    granted, in seconds. `states`: as they were at `heard`. `node`: this one."""
    others = [state for state in states if state.node != node and state.attempt == attempt]
    at = [heard - state.silent_seconds - state.work.seconds for state in others if state.work.seconds is not None]
    patience = max((state.work.patience for state in others if state.state == "alive"), default=0.0)
    return max(at, default=-math.inf), patience
