"""The coordinator's orders on one node, passed to its supervisor and its ranks; or the reason why there are none."""

from __future__ import annotations

from typing import Literal, Protocol

from sentinel import wire
from sentinel.cluster.connection import Connection
from sentinel.cluster.local_run import LocalRun
from sentinel.cluster.protocol.coordinator import Coordinator
from sentinel.cluster.protocol.messages import NodeRollback
from sentinel.cluster.protocol.node import Node
from sentinel.cluster.protocol.relay import RelayedRollback
from sentinel.cluster.protocol.restart import is_unaware
from sentinel.supervise.job_nodes import explain_left_out

NO_ORDERS = "orders need TLS, or a secret from SENTINEL_CLUSTER_SECRET or [cluster] secret_file (docs/cluster.md)"
"""Why there is no rollback, stop or restart of all nodes where the secret came through the process group's store."""
STARTED_ALONE = "`sentinel run` was started again here, while it goes on on other nodes: start it again on all"


class RoleHolder(Protocol):
    """Has the coordinator's role, if this node is the coordinator."""

    def leave_role(self) -> None:
        """Give the coordinator's role up, if this node has it."""


class NodeOrders:
    """Passes orders of one job on, and reports what its supervisor and ranks made of them."""

    def __init__(self, node: Node, connection: Connection, local: LocalRun, holder: RoleHolder) -> None:
        self._node, self._connection, self._local, self._holder = node, connection, local, holder
        self.last_report: wire.JobReport | None = None
        """The last report of the supervisor, which may have ended since."""
        self._mark = ""
        """Mark of that supervisor."""

    @property
    def are_taken(self) -> bool:
        """Whether the job takes orders from other nodes."""
        return self._connection.meeting.takes_orders

    @property
    def has_supervisor(self) -> bool:
        """Whether a supervisor is connected: it may start the ranks again."""
        return self._local.find_supervisor_report() is not None

    @property
    def has_completed(self) -> bool:
        """Whether no supervisor would start the ranks again."""
        report = self._local.find_supervisor_report()
        return report is None or report.status == 0

    def find_report(self) -> wire.JobReport | None:
        """Return the state of the job on this node; None: no supervisor reports, or the job takes no orders."""
        report = self._local.find_supervisor_report() if self.are_taken else None
        if report is None:
            return None
        if self._mark not in ("", mark := self._local.find_supervisor_mark()) and self._node.members.start:
            self._node.forget_members()
            self._holder.leave_role()
        self._mark, self.last_report = mark, report
        self._node.note_members(report.members)
        return report

    def find_relay(self) -> RelayedRollback | None:
        """Return the relay of orders to the ranks; None: there is none, or the job takes no orders."""
        return self._local.find_relay() if self.are_taken else None

    def report_rollback(self) -> NodeRollback | None:
        """Return how a rollback stands on this node; None: it takes part in none."""
        relay = self.find_relay()
        return relay.report() if relay is not None else None

    def follow(self, now: float, coordinator: Coordinator | None) -> None:
        """Pass the coordinator's order to the supervisor and the ranks, or the reason why there is none.
        `coordinator`: set if this node has the role."""
        if not self.are_taken:
            self._refuse_orders()
            return
        report = self.find_report()  # before the rest: the report may be of another job
        relay = self._local.find_relay()
        if self._node.is_left_out:
            why, nodes = explain_left_out(self._node.members), self._node.members.nodes
            if report is not None:
                self._local.order_supervisor(wire.Order(start=report.start, does="stop", why=why, nodes=nodes))
            if relay is not None:
                relay.apart = why
            return
        if report is not None:
            self._order_supervisor(report, now, coordinator)
        if relay is not None:
            self._order_ranks(relay, now, coordinator)

    def explain_absence(self, now: float, coordinator: Coordinator | None) -> str:
        """Return why this node has no order: whose is missing. `coordinator` as in `follow`."""
        if coordinator is not None:
            return coordinator.explain_inaction(now)
        return f"the coordinator at {self.find_address()} is not heard"

    def describe_absence(self, now: float, coordinator: Coordinator | None) -> str:
        """Return the same for people, with how long that has been so."""
        if self._node.is_left_out:
            return explain_left_out(self._node.members)
        return f"{self.explain_absence(now, coordinator)} (for {now - self._node.heard:.0f} s)"

    def find_address(self) -> str:
        """Return the address of the coordinator; where none is known, of the node that should be it."""
        addresses, routers = self._connection.meeting.addresses, self._connection.meeting.routers
        leader = self._node.election.leader or 0
        if routers:
            return f"node {leader} (by router {' or '.join(routers)})"
        return addresses[min(leader, len(addresses) - 1)]

    def _refuse_orders(self) -> None:
        """Say to the supervisor and the ranks that this job has no orders."""
        report, relay = self._local.find_supervisor_report(), self._local.find_relay()
        if report is not None and report.fault is not None:
            self._local.order_supervisor(wire.Order(start=report.start, does="stop", why=NO_ORDERS))
        if relay is not None:
            relay.no_orders = NO_ORDERS

    def _order_supervisor(self, report: wire.JobReport, now: float, coordinator: Coordinator | None) -> None:
        order = self._node.find_order(now)
        if is_unaware(report, self._node.members):
            does: Literal["stop", "end"] = "stop" if report.fault is not None else "end"
            self._local.order_supervisor(wire.Order(start=report.start, does=does, why=STARTED_ALONE))
        elif order is not None and order.start == report.start:
            self._local.order_supervisor(order)
        elif report.fault is not None:
            if coordinator is not None:
                why = f"more than half of the nodes must be heard; missing: {coordinator.name_missing(now)}"
            else:
                why = self.explain_absence(now, None)
            self._local.order_supervisor(wire.Order(start=report.start, does="wait", why=why))

    def _order_ranks(self, relay: RelayedRollback, now: float, coordinator: Coordinator | None) -> None:
        beat = self._node.beat
        if self._node.find_view(now) == "joined" and beat is not None:
            relay.apart = ""
            relay.take_order(beat.rollback, now)
        else:
            relay.apart = self.explain_absence(now, coordinator)
