"""Which snapshots on disk all nodes of a job hold.

    a node reports      the steps of which it has a part, and from which of them on it knows of enough that all have
    the coordinator     the steps that all have, and the least of what the nodes know: nothing older is needed

Nodes write without it. They learn from it what may be deleted, and delete only what all know to be superfluous; what
they do not know of they thin out. So there is a step that all hold, whatever is late, lost or of a former coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.cluster.protocol.messages import NodeRollback, RollbackOrder


class NodeDisk:
    """What the daemon of one node hands on between its first rank and the coordinator."""

    def __init__(self) -> None:
        self.kept: tuple[int, ...] = ()
        """The steps of which the node has a part."""
        self.safe = -1
        """From this one on it knows of enough that all nodes have; -1: it does not."""
        self.on_all: tuple[int, ...] = ()
        """The steps that all nodes have, of those that this one has; and before which none is needed."""
        self.floor = -1

    def take_order(self, order: RollbackOrder) -> None:
        """What a coordinator knows. A new one may know less."""
        self.on_all = tuple(sorted({*self.on_all, *order.on_all} & set(self.kept)))
        self.floor = max(self.floor, order.floor)

    def rewind(self, step: int) -> None:
        """The run went back to this step: what is younger is void."""
        self.kept = tuple(one for one in self.kept if one <= step)
        self.on_all, self.safe, self.floor = (), -1, -1


def list_on_all(reports: Mapping[int, NodeRollback], nodes: int, attempt: int) -> tuple[int, ...]:
    """The steps of which all nodes reported a part in this attempt, rising."""
    held = [set(report.on_disk) for report in reports.values() if report.attempt == attempt]
    return tuple(sorted(set.intersection(*held))) if len(held) == nodes else ()


def find_floor(reports: Mapping[int, NodeRollback], nodes: int, attempt: int) -> int:
    """The step before which no node needs a snapshot, as far as all know; -1: it is not known."""
    safe = [report.safe for report in reports.values() if report.attempt == attempt]
    return min(safe) if len(safe) == nodes else -1
