"""Exchanges which nodes have a rank at work: ranks that wait for it, on whatever node, do not hang."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from sentinel.cluster.protocol.messages import NodeState, WorkReport


class WorkExchange(Protocol):
    """What this node reports to others about its ranks' work, and learns about theirs."""

    def report(self, now: float) -> WorkReport:
        """Return the report on the work of this node's ranks."""

    def note(self, moment: float, patience: float) -> None:
        """Take note when a rank of another node was last seen at work, in monotonic seconds, and the longest patience
        that one is granted, in seconds."""


def find_work_elsewhere(states: Iterable[NodeState], node: int, attempt: int, heard: float) -> tuple[float, float]:
    """Return when a rank of another node was last seen at work, -inf if none is, and the longest patience that one is
    granted, in seconds. `states`: as they were at `heard`. `node`: this one."""
    others = [state for state in states if state.node != node and state.attempt == attempt]
    at = [heard - state.silent_seconds - state.work.seconds for state in others if state.work.seconds is not None]
    patience = max((state.work.patience for state in others if state.state == "alive"), default=0.0)
    return max(at, default=-math.inf), patience
