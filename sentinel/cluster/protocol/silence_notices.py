"""Lines on the training terminal about nodes that fall silent or return: one line for all of the same second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sentinel.cluster.protocol.messages import NodeState
from sentinel.text import join_names

_NAMED = 3
"""The most nodes named in one line: if a switch dies, there are many."""


class SilenceNotices:
    """The notices of one coordinator."""

    def __init__(self) -> None:
        self._silent = frozenset[int]()
        """Nodes that were reported as silent."""

    def describe_changes(self, states: Iterable[NodeState]) -> list[str]:
        """Return lines about the nodes that changed since the last call. `states`: of all nodes."""
        before, now = self._silent, list(states)
        self._silent = frozenset(state.node for state in now if state.state == "silent")
        fell = [state for state in now if state.state == "silent" and state.node not in before]
        returned = [state for state in now if state.state == "alive" and state.node in before]
        left = [state for state in now if state.state == "left" and state.node in before]
        lines = []
        if fell:
            steps = sorted({state.step for state in fell})
            reached = f"Last step: {steps[0]}" if len(steps) == 1 else f"Last steps: {steps[0]} to {steps[-1]}"
            down = "daemon or link is" if len(fell) == 1 else "their daemons or links are"
            lines.append(f"{_name(fell, 'is', 'are')} silent; {down} down. {reached}")
        if returned:
            lines.append(f"{_name(returned, 'is', 'are')} heard again")
        if left:
            lines.append(f"{_name(left, 'has', 'have')} left")
        return lines


def _name(states: Sequence[NodeState], one: str, many: str) -> str:
    names = join_names([f"{state.node} ({state.hostname})" for state in states], _NAMED)
    return f"node {names} {one}" if len(states) == 1 else f"nodes {names} {many}"
