"""In how many of a job's incidents each node was: the node to look at first, where a job fails again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

REMEMBERED = 1000
"""Incidents whose nodes may still change. Those before stay counted as they were."""
LEAST = 2
"""Incidents from which on a node is named."""


class BlameLedger:
    """Of one job. Counted are incidents that are a consequence of no other one."""

    def __init__(self, counts: Mapping[int, int] = {}, incidents: int = 0, counted: Collection[str] = ()) -> None:
        """What an earlier coordinator counted: by node, of how many incidents, and those of them that are open."""
        self.counts: Counter[int] = Counter(counts)
        self.incidents = incidents
        self._earlier = frozenset(counted)
        self._nodes: dict[str, tuple[int, ...]] = {}
        """Id -> the nodes that it is counted for."""

    def note(self, identity: str, nodes: tuple[int, ...]) -> None:
        """An incident is the fault of these nodes, as far as is known by now; (): it does not count."""
        if identity in self._earlier:
            return
        before = self._nodes.pop(identity, ())
        self._nodes[identity] = nodes
        self.counts.subtract(before)
        self.counts.update(nodes)
        self.incidents += bool(nodes) - bool(before)
        if len(self._nodes) > REMEMBERED:
            del self._nodes[next(iter(self._nodes))]

    def describe(self) -> str:
        """The node that was in more than half of the incidents and in more than any other; empty: there is none."""
        (node, count), (_, second) = [*self.counts.most_common(2), (-1, 0), (-1, 0)][:2]
        if count < LEAST or 2 * count <= self.incidents or count == second:
            return ""
        return f"node {node} was in {count} of {self.incidents} incidents"
