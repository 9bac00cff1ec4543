"""Counts in how many of a job's incidents each node was, to name the node to examine where a job fails repeatedly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

REMEMBERED = 1000
"""The most incidents whose nodes may still change. Older ones stay counted as they were."""
LEAST = 2
"""The fewest incidents for which a node is named."""


class BlameLedger:
    """Incidents of one job by node. It counts only incidents that are not a consequence of another one."""

    def __init__(self, counts: Mapping[int, int] = {}, incidents: int = 0, counted: Collection[str] = ()) -> None:
        """Start from an earlier coordinator's count. `counts`: by node, of `incidents` incidents. `counted`: ids of
        those that are open, and already counted."""
        self.counts: Counter[int] = Counter(counts)
        self.incidents = incidents
        self._earlier = frozenset(counted)
        self._nodes: dict[str, tuple[int, ...]] = {}
        """Id of an incident -> the nodes for which it is counted."""

    def note(self, identity: str, nodes: tuple[int, ...]) -> None:
        """Count an incident for the nodes at fault, as far as is known by now; (): it does not count."""
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
        """Name the node that was in more than half of the incidents and in more than any other; empty: none was."""
        (node, count), (_, second) = [*self.counts.most_common(2), (-1, 0), (-1, 0)][:2]
        if count < LEAST or 2 * count <= self.incidents or count == second:
            return ""
        return f"node {node} was in {count} of {self.incidents} incidents"
