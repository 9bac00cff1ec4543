"""Simulates a job that may go on without some of its nodes, while some are lost for good."""

from __future__ import annotations

import random

from sentinel import wire
from sentinel.cluster.protocol.messages import Beat, Pulse
from sentinel.cluster.protocol.restart import PATIENCE_SECONDS
from sentinel.supervise.job_nodes import JobNodes
from tests.cluster.simulation import LeadMachine, NodeMachine, Simulation, SupervisorMachine

LEAST = 2
FORMER = 32
"""Epoch of a coordinator of the previous job, whose clock was behind."""


class ShrinkSupervisor(SupervisorMachine):
    """`sentinel run --allow-shrink` of a node; what it agreed to is lost only when it is lost itself."""

    def __init__(self, number: int, whole: int) -> None:
        super().__init__(number)
        self.nodes = JobNodes(LEAST, number, whole)
        self.groups: list[tuple[int, ...]] = [self.nodes.members.nodes]
        """Nodes of each of its starts."""
        self.is_left_out = False

    @property
    def report(self) -> wire.JobReport | None:
        report = super().report
        return self.nodes.add_to(report) if report is not None else None

    def carry_out(self, order: wire.Order, now: float, delay: float) -> None:
        if self.gone or order.start != self.start:
            return
        if self.nodes.is_left_out(order):
            self.gone = self.is_left_out = True
            return
        if self.fault is not None and order.does == "begin":
            self.nodes.begin(order)
            self.groups.append(self.nodes.members.nodes)
        elif self.fault is not None:
            self.nodes.hear(order)
        super().carry_out(order, now, delay)


class ShrinkSimulation(Simulation):
    """A simulation with incidents, faults, dying daemons and cuts, in which nodes are lost for good, one by one."""

    def __init__(self, seed: int, *, nodes: int) -> None:
        super().__init__(seed, nodes=nodes)
        self.machines = [ShrinkSupervisor(number, nodes) for number in range(nodes)]
        self.supervisors = list(self.machines)
        self.lost_at = self.random.uniform(20.0, 60.0)
        self.decisions: dict[int, tuple[int, ...]] = {0: tuple(range(nodes))}
        """By start: the nodes that began it."""
        self.falls: list[tuple[float, int]] = []
        """(time, node) of coming deaths of daemons that have just proposed or decided something."""
        self._former = random.Random(f"former {seed}")
        self.apart: tuple[int, float] | None = None
        """A node that is cut off for a long time, and until when."""

    def play(self, seconds: float = 400.0) -> None:
        """Play `seconds` with trouble, and then a while without any."""
        while self.now < seconds:
            self.turn()
            self.trouble()
        self.loss, self.delay, self.cut = 0.0, 0.05, set()
        until = self.now + 3 * PATIENCE_SECONDS
        while self.now < until:
            self.turn()
            self.end_daemons()
            for node, machine in zip(self.nodes, self.machines, strict=True):
                if node.daemon is None and not machine.gone:
                    node.start(self.now)

    def trouble(self) -> None:
        chance = self.random.random
        if chance() < 0.005:
            self.break_job(self.random.choice(self.machines))
        if self.cut and chance() < 0.05:
            self.cut = set()
        elif chance() < 0.005:
            self.cut = self.make_cut()
        for node in self.nodes:
            if node.daemon is None and chance() < 0.2:
                node.start(self.now)
            elif chance() < 0.002:
                node.die()
        if chance() < 0.005 and (acting := self.find_acting()) is not None:
            self.nodes[acting.coordinator.node].die()
        for fall in [fall for fall in self.falls if fall[0] <= self.now]:
            self.falls.remove(fall)
            self.nodes[fall[1]].die()
        if self.now > self.lost_at:
            self.lost_at = self.now + self.random.uniform(PATIENCE_SECONDS, 3 * PATIENCE_SECONDS)
            self.lose(self.random.choice(self.nodes[1:]))
        if self._former.random() < 0.1:
            self.hear_former_job(self._former.randrange(1, self.expected))
        if self.apart is not None:
            node, until = self.apart
            links = {pair for other in range(self.expected) for pair in ((node, other), (other, node))}
            self.cut = self.cut | links if self.now < until else self.cut - links
            self.apart = self.apart if self.now < until else None
        self.end_daemons()

    def hear_former_job(self, number: int) -> None:
        """Send messages of a daemon left over from the previous job (same run id), which went on with two nodes."""
        job = "mark 0 of the job before"
        members = wire.Members(start=5, nodes=(0, number), whole=self.expected, job=job)
        accepted = wire.Order(start=4, does="end", epoch=FORMER, nodes=members.nodes, job=job)
        report = wire.JobReport(start=5, allow_shrink=LEAST, members=members, promised=FORMER, accepted=accepted)
        pulse = Pulse(node=number, incarnation=0, hostname="h", attempt=5, step=0, epoch=FORMER, job=report)
        self.send(number, range(self.expected), pulse)
        beat = Beat(node=number, epoch=FORMER + number, stamp=self.now, expected=2, nodes=(), members=members)
        self.send(number, range(self.expected), beat)

    def end_daemons(self) -> None:
        """End the daemons of nodes whose ranks are gone: only ranks start a daemon."""
        for node, machine in zip(self.nodes, self.machines, strict=True):
            if machine.gone:
                node.die()

    def lose(self, node: NodeMachine) -> None:
        """Lose a node: its machine is gone, or cannot be reached for long, and so the other nodes' ranks fail."""
        if self.random.random() < 0.5:
            self.apart = node.number, self.now + self.random.uniform(PATIENCE_SECONDS, 3 * PATIENCE_SECONDS)
        else:
            node.die()
            self.machines[node.number].gone = True

    def follow_jobs(self) -> None:
        for one in self.machines:
            group = [self.machines[number] for number in one.nodes.members.nodes]
            alone = any(other.gone or other.start != one.start for other in group)
            if one.runs and one.ends_at is not None and self.now >= one.ends_at:
                one.end(self.now)
            elif one.runs and alone and self.random.random() < 0.1:
                self.break_job(one)
            elif one.fault is not None and self.now - one.waits_since > 2 * PATIENCE_SECONDS:
                one.gone = True

    def carry_out(self, number: int, order: wire.Order | None) -> None:
        machine, daemon = self.machines[number], self.nodes[number].daemon
        if daemon is not None and daemon.is_left_out:
            order = wire.Order(start=machine.start, does="stop", nodes=daemon.members.nodes)
        if order is None:
            return
        before = machine.start
        machine.carry_out(order, self.now, self.random.uniform(0.0, 20.0))
        if machine.start > before:
            self.check_begun(machine, order)

    def check_begun(self, machine: ShrinkSupervisor, order: wire.Order) -> None:
        """Check that all nodes of a start begin it as one group: a majority of the former, of which none still runs."""
        assert not machine.is_left_out, "begun by a node that was left out"
        nodes, former = machine.groups[-1], self.decisions[machine.start - 1]
        assert self.decisions.setdefault(machine.start, nodes) == nodes, "a start of two groups"
        assert machine.number in nodes
        assert 0 in nodes
        assert set(nodes) <= set(former), "a node that was left out is there again"
        assert 2 * len(nodes) > len(former), "a minority goes on"
        assert len(nodes) >= LEAST
        others = [self.machines[number] for number in nodes]
        assert not [one for one in others if one.runs and one.start < machine.start], "begun while another node runs"

    def order_nodes(self, node: NodeMachine, lead: LeadMachine) -> None:
        before, lead.order = lead.order, lead.coordinator.order_nodes(node.clock(self.now))
        assert lead.order is None or self.find_acting() is lead
        if lead.order is not None and lead.order.nodes and lead.order != before and self.random.random() < 0.5:
            self.falls.append((self.now + self.random.uniform(0.0, 4.0), node.number))

    def judge_steps(self, lead: LeadMachine) -> None:
        """Do nothing: steps are not checked here."""

    def check_untold(self, lead: LeadMachine, *, acts: bool) -> None:
        """Check nothing: a node that was left out knows of incidents that others do not."""
