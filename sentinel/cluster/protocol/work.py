"""Ranks that wait for one that works do not hang, on whatever node that is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from sentinel.cluster.protocol.messages import NodeState, WorkReport


class WorkExchange(Protocol):
    """What this node tells others of its ranks, and hears of theirs."""

    def report(self, now: float) -> WorkReport:
        """What this node's ranks do."""

    def note(self, moment: float, patience: float) -> None:
        """When a rank of another node was last seen at work, in monotonic seconds, and the longest that one is
        granted."""


def find_work_elsewhere(states: Iterable[NodeState], node: int, attempt: int, heard: float) -> tuple[float, float]:
    """When a rank of another node was last seen at work, -inf where none is, and the longest that one is granted.
    `states`: as they were at `heard`. `node`: this one."""
    others = [state for state in states if state.node != node and state.attempt == attempt]
    at = [heard - state.silent_seconds - state.work.seconds for state in others if state.work.seconds is not None]
    patience = max((state.work.patience for state in others if state.state == "alive"), default=0.0)
    return max(at, default=-math.inf), patience
