"""Simulates the protocol of a job over nodes, without network and clock.

One node is the coordinator; the net drops, doubles, delays and reorders messages, works in one direction only, or
falls apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from sentinel import wire
from sentinel.cluster.lead import restore_pages
from sentinel.cluster.protocol.coordinator import SETTLE_SECONDS, SILENT_SECONDS, Coordinator
from sentinel.cluster.protocol.digest import DigestSender, JobSteps
from sentinel.cluster.protocol.election import next_epoch
from sentinel.cluster.protocol.job_incident import JobIncident
from sentinel.cluster.protocol.messages import Beat, ClusterMessage, Digest, Events, Pulse, decode, encode
from sentinel.cluster.protocol.node import Node
from sentinel.cluster.protocol.rollback import JobRollbacks
from sentinel.daemon.job.standstill import HOLD_SECONDS
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.runs.steps import RunStep
from sentinel.supervise.supervisor import ORDER_SECONDS

TICK = 0.5
SLOWEST = 1.04
"""Slightly more than the simulation's seconds in one second of the slowest node's clock."""
ALERTS = ("Hang", "LossSpike")


def make_case(number: int, alert: str, step: int) -> Case:
    """Return a case of a node that fires."""
    return Case(
        id=f"0.{number}", run="train", run_id="r", attempt=0, alert=alert, severity="critical", state="firing",
        first_step=step, first_seq=step, step=step, time=float(step), members=(), summary=alert,
        diagnosis=Finding(cause="", confidence="none"), told=True,
    )  # fmt: skip


class Packet(NamedTuple):
    at: float
    order: float
    to: int
    sender: int
    kind: type[ClusterMessage]
    payload: bytes


class SupervisorMachine:
    """`sentinel run` of a node, which outlives daemons and every start of its command."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start = 0
        self.fault: wire.JobFault | None = None
        self.ends_at: float | None = None
        """When the last process of a start that is being ended will be gone."""
        self.waits_since = 0.0
        self.gone = False
        self.last_begun: wire.Order | None = None
        self.begun: list[str] = []
        """For each further start, the words of the fault after which it was begun."""

    @property
    def report(self) -> wire.JobReport | None:
        if self.gone:
            return None
        return wire.JobReport(
            start=self.start, attempt=self.start, restarts=99, fault=self.fault, begun=self.last_begun,
            mark=f"mark {self.number}",
        )  # fmt: skip

    @property
    def runs(self) -> bool:
        return not self.gone and self.fault is None

    def end(self, now: float, words: str = "") -> None:
        """Note that the start has ended by itself, or that its end was ordered."""
        self.fault, self.ends_at = wire.JobFault(kind=words, words=words or "ordered", step=int(now)), None
        self.waits_since = now

    def carry_out(self, order: wire.Order, now: float, delay: float) -> None:
        if self.gone or order.start != self.start:
            return
        if order.does == "end" and self.fault is None:
            self.ends_at = self.ends_at or now + delay
        elif order.does == "begin" and self.fault is not None:
            assert order.fault is not None
            self.begun.append(order.fault.words)
            self.start, self.fault, self.last_begun = self.start + 1, None, order
        elif order.does == "stop" and self.fault is not None:
            self.gone = True


def make_step(node: int, seq: int) -> RunStep:
    """Return a step of a node with two ranks."""
    ranks = {rank: {"loss": seq + rank / 100} for rank in (2 * node, 2 * node + 1)}
    return RunStep(seq, float(seq), ranks, {})


class Inquest(NamedTuple):
    """A question to the ranks of all nodes about the cause of an incident."""

    incident: JobIncident
    until: float
    """The page is held back until this time, unless there is an answer."""
    answered: float
    verdict: Finding | None


class LeadMachine:
    """The state that a node has while it is the coordinator."""

    def __init__(self, coordinator: Coordinator, nodes: int) -> None:
        self.coordinator = coordinator
        self.order: wire.Order | None = None
        self.heard: dict[int, float] = {}
        """Time of each node's last heartbeat, by node."""
        self.steps = JobSteps(coordinator.node, range(nodes))
        self.judged: list[RunStep] = []
        self.inquests: list[Inquest] = []
        self.acts_since = 0.0
        """Time since which it acts."""
        self.untold: dict[str, float] = {}
        """By firing incident without a page: the time since which its page is due."""
        self.rollbacks: JobRollbacks | None = None
        """Set if there are ranks that can be stopped (tests/cluster/stop_simulation.py)."""


class NodeMachine:
    """A node, whose history and sent pages outlive its daemon."""

    def __init__(self, number: int, candidates: int, chance: random.Random) -> None:
        self.number, self._candidates = number, candidates
        self._ahead, self._pace = chance.uniform(0.0, 1e6), chance.uniform(0.97, 1.03)
        self.history: dict[str, Case] = {}
        self.pages: dict[str, str] = {}
        """Case -> state of the node's own page about it."""
        self.self_told: set[str] = set()
        self.daemon: Node | None = None
        self.lead: LeadMachine | None = None
        self.outbox: dict[str, Case] = {}
        """Cases of the job that it paged and that it has not yet paged as over."""
        self.starts = 0
        self.last_job: wire.JobReport | None = None
        """The supervisor's last report to this daemon."""
        self.sender: DigestSender

    def clock(self, now: float) -> float:
        """Return what its clock shows; no two clocks show the same, or run at the same pace."""
        return self._ahead + self._pace * now

    def start(self, now: float) -> None:
        self.starts += 1
        self.last_job = None
        self.sender = DigestSender(self.number, 0, {"loss"})
        self.daemon = Node(self.number, self.starts, self.clock(now), self._candidates)
        for case in self.outbox.values():
            self.daemon.record_page(case)
        for case in self.history.values():
            self.daemon.record(case)

    def die(self) -> None:
        self.daemon = self.lead = None

    def page(self, cases: list[Case]) -> None:
        for case in cases:
            self.pages[case.id] = case.state
            self.self_told.add(case.id)


class Simulation:
    """A simulated job, by one seed: incidents begin and end, and anything may die, until all is well again."""

    def __init__(
        self, seed: int, *, nodes: int = 4, candidates: int = 3, deaths: bool = True, cuts: bool = True,
        leaves: bool = False,
    ) -> None:  # fmt: skip
        """Build the job. With `leaves`, daemons are also ended in order and return; their last messages may be lost."""
        self.random, self._verdicts = random.Random(seed), random.Random(f"verdicts {seed}")
        self._leaves, self._leaving, self._back_at = leaves, list[NodeMachine](), 0.0
        self.deaths, self.cuts = deaths, cuts
        self.loss, self.delay = self.random.choice([0.0, 0.05, 0.3]), self.random.choice([0.05, 0.5, 3.0])
        self.nodes = [NodeMachine(number, candidates, self.random) for number in range(nodes)]
        self.expected = nodes
        self.supervisors = [SupervisorMachine(number) for number in range(nodes)]
        self.decided: set[tuple[Coordinator, int]] = set()
        """Coordinator and start of each order to begin."""
        self.faults_of_jobs = 0
        self.now, self.step, self.cases = 0.0, 0, 0
        self.net: list[Packet] = []
        self.cut: set[tuple[int, int]] = set()
        """Links that are down, as (sender, receiver)."""
        self.coordinators: list[int] = []
        """Nodes that acted as the coordinator, in order."""
        self.trained = 0
        """Number of steps that all ranks have done."""
        self.pages: dict[str, Case] = {}
        """Cases as the job's receivers know them, by id."""
        self.told: set[tuple[int, str]] = set()
        """(node, id) of the cases that a coordinator paged."""
        self.ids: dict[tuple[str, int], set[str]] = {}
        """By fault: the ids under which it was paged as firing."""
        self.faults: dict[tuple[int, str], tuple[str, int]] = {}
        """By node and case: the fault that the case is about."""
        self._fault: tuple[str, int] | None = None
        for node in self.nodes:
            node.start(0.0)

    def play(self, seconds: float = 150.0) -> None:
        """Play `seconds` with trouble, and then two minutes without any."""
        while self.now < seconds:
            self.turn()
            self.trouble()
        self.loss, self.delay, self.cut = 0.0, 0.05, set()
        for node in self.nodes:
            if node.daemon is None:
                node.start(self.now)
        until = self.now + 120.0
        while self.now < until:
            self.turn()

    def find_acting(self) -> LeadMachine | None:
        """Return the acting coordinator, or None; check that there are never two."""
        acting = [
            node.lead
            for node in self.nodes
            if node.lead is not None and node.lead.coordinator.is_acting(node.clock(self.now))
        ]
        assert len(acting) <= 1, "two coordinators act"
        return acting[0] if acting else None

    def trouble(self) -> None:
        """Begin or end a fault on some nodes; let links, daemons or the coordinator go or come back, at random."""
        chance = self.random.random
        if self._fault is None and chance() < 0.06:
            self.step += 10
            self._fault = (self.random.choice(ALERTS), self.step)
        elif self._fault is not None and chance() < 0.04:
            self.end_fault()
        if self._fault is not None and chance() < 0.3:
            self.fire(self.random.choice(self.nodes), self._fault)
        if chance() < 0.02:
            self.break_job(self.random.choice(self.supervisors))
        if self.cuts and chance() < 0.02:
            self.cut = self.make_cut()
        if not self.deaths:
            return
        if chance() < 0.03:
            node = self.random.choice(self.nodes)
            if node.daemon is None or chance() < 0.3:
                node.die()
                node.start(self.now)  # while messages of the former daemon are on their way
            else:
                node.die()
        if chance() < 0.02 and (acting := self.find_acting()) is not None:
            self.nodes[acting.coordinator.node].die()
        if chance() < 0.001:
            self.random.choice(self.supervisors).gone = True
        if self._leaves:
            self.restart_services()

    def restart_services(self) -> None:
        """End daemons of some nodes in order, and start them seconds later, when a link may be down."""
        if not self._leaving and self.random.random() < 0.01:
            self._leaving = self.random.sample(self.nodes, self.random.randint(1, self.expected - 1))
            self._back_at = self.now + self.random.uniform(1.0, 5.0)
            for node in self._leaving:
                self.leave(node)
        elif self._leaving and self.now >= self._back_at:
            self.cut = self.make_cut()
            for node in self._leaving:
                if node.daemon is None:
                    node.start(self.now)
            self._leaving = []

    def leave(self, node: NodeMachine) -> None:
        """End a node's daemon as when a service is restarted, while the ranks train on."""
        if (daemon := node.daemon) is not None:
            now = node.clock(self.now)
            if (lead := node.lead) is not None:
                self.tell(node, lead, leaving=True)
                self.send(node.number, range(self.expected), lead.coordinator.make_beat(now, leaving=True))
            node.page(daemon.take_untold(now, leaving=True))
            self.hand_in(node.number, msgspec.structs.replace(self.pulse(node, daemon), leaving=True))
            node.die()

    def make_cut(self) -> set[tuple[int, int]]:
        """Return links to cut: none, some in one direction, those of one node, or those between two parts."""
        every = range(self.expected)
        kind, node = (
            self.random.choice(["none", "none", "parts", "node", "one way", "deaf", "mute"]),
            self.random.choice(every),
        )
        part = set(self.random.sample(every, self.random.randint(1, self.expected - 1)))
        pairs = [(sender, to) for sender in every for to in every if sender != to]
        return {
            "none": set(),
            "parts": {(sender, to) for sender, to in pairs if (sender in part) != (to in part)},
            "node": {pair for pair in pairs if node in pair},
            "one way": {(sender, to) for sender, to in pairs if sender in part and to not in part},
            "deaf": {(sender, to) for sender, to in pairs if to == node},
            "mute": {(sender, to) for sender, to in pairs if sender == node},
        }[kind]

    def break_job(self, supervisor: SupervisorMachine) -> None:
        """Let a supervisor's rank die; ranks of other nodes fail because of it, or wait."""
        if supervisor.runs:
            self.faults_of_jobs += 1
            supervisor.end(self.now, f"RankLost {self.faults_of_jobs}")

    def follow_jobs(self) -> None:
        """End processes as ordered, and starts that are alone; a supervisor waits only for a limited time."""
        for one in self.supervisors:
            alone = any(other.gone for other in self.supervisors)
            if one.runs and one.ends_at is not None and self.now >= one.ends_at:
                one.end(self.now)
            elif one.runs and alone and self.random.random() < 0.1:
                self.break_job(one)
            elif one.fault is not None and self.now - one.waits_since > ORDER_SECONDS:
                one.gone = True

    def carry_out(self, number: int, order: wire.Order | None) -> None:
        """Carry out an order on a node; check that no start begins while another node runs an earlier one."""
        supervisor = self.supervisors[number]
        if order is None:
            return
        begins = order.does == "begin" and order.start == supervisor.start and not supervisor.gone
        if begins:
            assert supervisor.fault is not None
            for one in self.supervisors:
                assert one.gone or one.start > order.start or one.fault is not None, "begun while another node runs"
        supervisor.carry_out(order, self.now, self.random.uniform(0.0, 20.0))

    def order_nodes(self, node: NodeMachine, lead: LeadMachine) -> None:
        """Let the coordinator order; check that it has a majority of the nodes, and for `begin` all of them."""
        lead.order = lead.coordinator.order_nodes(node.clock(self.now))
        fresh = sum(self.now - heard <= SILENT_SECONDS + 1.0 for heard in lead.heard.values())
        if lead.order is not None:
            assert self.find_acting() is lead
            assert 2 * fresh > lead.coordinator.expected, "an order of a minority"
            decided = (lead.coordinator, lead.order.start)  # it may raise its epoch and repeat its decision
            begun = any(one.start > lead.order.start for one in self.supervisors)
            if lead.order.does == "begin" and decided not in self.decided and not begun:
                self.decided.add(decided)
                assert fresh == self.expected, "begun without a node"

    def fire(self, node: NodeMachine, fault: tuple[str, int]) -> None:
        open_here = any(case.alert == fault[0] and case.state == "firing" for case in node.history.values())
        if node.daemon is None or open_here:
            return
        self.cases += 1
        case = make_case(self.cases, *fault)
        self.faults[node.number, case.id] = fault
        self.change(node, case)

    def end_fault(self) -> None:
        """End the fault's cases on all nodes; where there is no daemon, only the history learns of it."""
        self._fault = None
        self.step += 5
        for node in self.nodes:
            for case in list(node.history.values()):
                if case.state == "firing":
                    over = msgspec.structs.replace(
                        case, state="resolved", resolved_step=self.step, resolved_time=float(self.step)
                    )
                    if node.daemon is None:
                        node.history[case.id] = over
                    else:
                        self.change(node, over)

    def change(self, node: NodeMachine, case: Case) -> None:
        assert node.daemon is not None
        node.history[case.id] = case
        if node.pages.get(case.id) == "firing":
            node.page([case])
        events = node.daemon.record(case)
        self.hand_in(node.number, events)
        if node.lead is not None:
            node.lead.coordinator.take_events(events)
            self.tell(node, node.lead)

    def hand_in(self, sender: int, message: ClusterMessage) -> None:
        """Send a message to the nodes that have the coordinator's role, or believe so."""
        if leads := [node.number for node in self.nodes if node.lead is not None]:
            self.send(sender, leads, message)

    def send(self, sender: int, receivers: Iterable[int], message: ClusterMessage) -> None:
        payload = encode(message)
        for to in receivers:
            for _ in range(2 if self.random.random() < self.loss else 1):
                if to != sender and self.random.random() >= self.loss:
                    at = self.now + self.random.uniform(0.0, self.delay)
                    self.net.append(Packet(at, self.random.random(), to, sender, type(message), payload))

    def turn(self) -> None:
        self.now += TICK
        arrived = sorted(packet for packet in self.net if packet.at <= self.now)
        self.net = [packet for packet in self.net if packet.at > self.now]
        for packet in arrived:
            node = self.nodes[packet.to]
            if (packet.sender, packet.to) not in self.cut and node.daemon is not None:
                self.arrive(node, node.daemon, packet)
        self.follow_jobs()
        self.train()
        for node in self.nodes:
            if node.daemon is not None:
                self.serve(node, node.daemon)
        acting = self.find_acting()
        if acting is not None and self.coordinators[-1:] != [acting.coordinator.node]:
            self.coordinators.append(acting.coordinator.node)
        for node in self.nodes:
            if node.lead is not None:
                self.check_untold(node.lead, acts=node.lead is acting)

    def check_untold(self, lead: LeadMachine, *, acts: bool) -> None:
        """Check that an acting coordinator pages what it has collected, at the latest `HOLD_SECONDS` later."""
        if not acts:
            lead.acts_since = self.now
            lead.untold.clear()
        ready = lead.acts_since + SLOWEST * SETTLE_SECONDS
        for incident in lead.coordinator.incidents if acts else ():
            if incident.firing and incident.id not in self.pages:
                since = lead.untold.setdefault(incident.id, max(self.now, ready))
                assert self.now - since <= HOLD_SECONDS + 2 * TICK, f"no page of {incident.alert}"

    def serve(self, node: NodeMachine, daemon: Node) -> None:
        """Do what a daemon does once a second."""
        now = node.clock(self.now)
        if node.lead is not None:
            daemon.note_members(node.lead.coordinator.members)
        if daemon.is_left_out:
            if node.lead is not None:
                self.leave_role(node, daemon)
        elif node.lead is None and daemon.election.is_due(now):
            self.take_role(node, daemon)
        elif node.lead is not None and node.lead.coordinator.has_failed(now):
            self.leave_role(node, daemon)
        pulse = self.pulse(node, daemon)
        self.hand_in(node.number, pulse)
        if (lead := node.lead) is not None:
            lead.heard[node.number] = self.now
            lead.coordinator.take_pulse(pulse, now)
            for number, after in lead.coordinator.list_missing(now):
                self.ask(node.number, number, after)
            self.explain(lead)
            self.tell(node, lead)
            self.order_nodes(node, lead)
            self.judge_steps(lead)
            self.beat(node, daemon, lead)
        node.page(daemon.take_untold(now))
        self.carry_out(node.number, daemon.find_order(now))

    def take_role(self, node: NodeMachine, daemon: Node) -> None:
        beat = daemon.recall_beat(node.clock(self.now))
        pages = restore_pages(beat.incidents if beat else (), "r", "r")
        epoch = next_epoch(daemon.election.epoch, node.number, int(1000 * (self.now + 1)))
        coordinator = Coordinator(
            node.number, daemon.members.count(self.expected), epoch, node.clock(self.now), pages, daemon.members,
            earlier=beat.nodes if beat else (),
        )  # fmt: skip
        node.lead = LeadMachine(coordinator, self.expected)
        node.lead.steps.take_own(node.sender.list_unconfirmed(), self.now)

    def leave_role(self, node: NodeMachine, daemon: Node) -> None:
        node.lead, node.sender = None, DigestSender(node.number, 0, {"loss"})
        daemon.election.release(node.clock(self.now))
        for case in node.outbox.values():
            daemon.record_page(case)

    def beat(self, node: NodeMachine, daemon: Node, lead: LeadMachine) -> None:
        beat = self.make_beat(node, lead)
        self.send(node.number, range(self.expected), beat)
        self.follow(node, daemon, beat)

    def make_beat(self, node: NodeMachine, lead: LeadMachine) -> Beat:
        digested = {str(number): upto for number, upto in lead.steps.reached.items()}
        beat = lead.coordinator.make_beat(node.clock(self.now), order=lead.order)
        return msgspec.structs.replace(beat, digested=digested)

    def train(self) -> None:
        """Let all ranks do a step; the running daemons see it."""
        seq, self.trained = self.trained, self.trained + 1
        for node in self.nodes:
            if node.lead is not None:
                node.lead.steps.add_own(make_step(node.number, seq), self.now)
            elif node.daemon is not None:
                node.sender.add(make_step(node.number, seq))
                if (digest := node.sender.make_digest(self.now)) is not None:
                    self.hand_in(node.number, digest)

    def judge_steps(self, lead: LeadMachine) -> None:
        """Check that the judged values are the ranks' own, and that each step is judged once and in order."""
        for step in lead.steps.take_closed(self.now):
            assert not lead.judged or step.seq > lead.judged[-1].seq
            assert all(values == {"loss": step.seq + rank / 100} for rank, values in step.ranks.items())
            nodes = {rank // 2 for rank in step.ranks}
            missing = set(range(self.expected)) - nodes
            assert missing.isdisjoint(lead.steps.list_awaited()), "judged without a node that was waited for"
            lead.judged.append(step)

    def pulse(self, node: NodeMachine, daemon: Node) -> Pulse:
        job = self.supervisors[node.number].report
        node.last_job = job or node.last_job
        if job is not None:
            daemon.note_members(job.members)
        return Pulse(
            node=daemon.node, incarnation=daemon.incarnation, hostname="h", attempt=0, step=0, last=daemon.last,
            epoch=daemon.election.epoch, stamp=daemon.election.stamp, job=job,
            last_job=node.last_job if job is None else None,
        )  # fmt: skip

    def ask(self, sender: int, number: int, after: int) -> None:
        """Ask a node for its events; the query or the answer may be lost."""
        daemon = self.nodes[number].daemon
        reached = sender == number or ((sender, number) not in self.cut and self.random.random() >= self.loss)
        if daemon is not None and reached and daemon.find_view(self.nodes[number].clock(self.now)) == "joined":
            events = daemon.list_events(after)
            lead = self.nodes[sender].lead
            if sender == number and lead is not None:
                lead.coordinator.take_events(events)
            else:
                self.send(number, [sender], events)

    def arrive(self, node: NodeMachine, daemon: Node, packet: Packet) -> None:
        message, now = decode(packet.payload, packet.kind), node.clock(self.now)
        if not daemon.members.has(packet.sender):
            return
        if isinstance(message, Beat):
            if node.lead is not None and node.lead.coordinator.yields_to(message, now):
                self.leave_role(node, daemon)
            if node.lead is None:
                self.follow(node, daemon, message)
        elif (lead := node.lead) is None:
            return
        elif isinstance(message, Pulse):
            lead.heard[message.node] = self.now
            lead.coordinator.take_pulse(message, now)
        elif isinstance(message, Events):
            lead.coordinator.take_events(message)
            self.tell(node, lead)
        elif isinstance(message, Digest):
            lead.steps.take(message, self.now)

    def follow(self, node: NodeMachine, daemon: Node, beat: Beat) -> None:
        now, epoch = node.clock(self.now), daemon.election.epoch
        applied = daemon.take_beat(beat, now)
        assert daemon.election.epoch >= epoch
        if daemon.beat is not beat:
            return
        if node.lead is None and beat.acting:
            if not daemon.has_pages:
                node.outbox.clear()
            node.sender.confirm(beat.digested.get(str(node.number), -1), self.now)
        for identity in applied:
            if node.pages.get(identity) == "firing":
                node.pages[identity] = "resolved"
        assert beat.epoch == daemon.election.epoch, "an order of a lower epoch"
        self.carry_out(node.number, daemon.find_order(now))

    def explain(self, lead: LeadMachine) -> None:
        """Hand over the causes that have come, and let pages go out that have waited long enough."""
        for one in list(lead.inquests):
            if self.now >= one.answered:
                lead.coordinator.incidents.explain(one.incident, one.verdict)
                lead.inquests.remove(one)
            elif self.now >= one.until:
                one.incident.awaits_verdict = False

    def tell(self, node: NodeMachine, lead: LeadMachine, *, leaving: bool = False) -> None:
        for incident in lead.coordinator.take_unexplained(node.clock(self.now)):
            found = Finding(cause="rank 0", confidence="high")
            verdict = found if self._verdicts.random() < 0.5 else None
            answered = self.now + self._verdicts.uniform(0.0, 2 * HOLD_SECONDS)
            lead.inquests.append(Inquest(incident, self.now + HOLD_SECONDS, answered, verdict))
        changes = lead.coordinator.take_changes(node.clock(self.now), leaving=leaving)
        waits = {one.incident.id for one in lead.inquests if self.now < one.until and not leaving}
        for case in changes:
            assert self.find_acting() is lead
            assert case.id not in waits, "the page goes out before the cause is there"
            self.pages[case.id] = case
            node.outbox.pop(case.id, None)
            if case.state == "firing":
                node.outbox[case.id] = case
                self.ids.setdefault((case.alert, case.first_step), set()).add(case.id)
        for case in lead.coordinator.take_folded(node.clock(self.now)):
            self.pages[case.id] = case
            node.outbox.pop(case.id, None)
        self.told |= {key for one in lead.coordinator.incidents if one.id in self.pages for key in one.cases}
