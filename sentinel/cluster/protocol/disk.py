"""Finds the snapshots on disk that all nodes of a job hold.

    a node reports      the steps of which it has a part, and from which of them on it knows of enough that all have
    the coordinator     the steps that all have, and the least of what the nodes know: nothing older is needed

Nodes write snapshots without waiting for it. It tells them what may be deleted, and they delete only what all know to
be superfluous; steps of which that is not known are thinned out. So there is always a step that all hold, whatever is
late, lost or from a former coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.cluster.protocol.messages import NodeRollback, RollbackOrder


class NodeDisk:
    """The state that one node's daemon passes between the node's first rank and the coordinator."""

    def __init__(self) -> None:
        self.kept: tuple[int, ...] = ()
        """The steps of which the node has a part."""
        self.safe = -1
        """The step from which on this node knows of enough snapshots that all nodes have; -1: it does not."""
        self.on_all: tuple[int, ...] = ()
        """The steps that all nodes have, of those that this one has."""
        self.floor = -1
        """The step before which no snapshot is needed; -1: not known."""

    def take_order(self, order: RollbackOrder) -> None:
        """Take over what a coordinator knows. A new one may know less."""
        self.on_all = tuple(sorted({*self.on_all, *order.on_all} & set(self.kept)))
        self.floor = max(self.floor, order.floor)

    def rewind(self, step: int) -> None:
        """Drop the younger steps, as the run went back to this one."""
        self.kept = tuple(one for one in self.kept if one <= step)
        self.on_all, self.safe, self.floor = (), -1, -1


def list_on_all(reports: Mapping[int, NodeRollback], nodes: int, attempt: int) -> tuple[int, ...]:
    """Return the steps of which all nodes reported a part in this attempt, rising."""
    held = [set(report.on_disk) for report in reports.values() if report.attempt == attempt]
    return tuple(sorted(set.intersection(*held))) if len(held) == nodes else ()


def find_floor(reports: Mapping[int, NodeRollback], nodes: int, attempt: int) -> int:
    """Return the step before which no node needs a snapshot, as far as all know; -1: not known."""
    safe = [report.safe for report in reports.values() if report.attempt == attempt]
    return min(safe) if len(safe) == nodes else -1
