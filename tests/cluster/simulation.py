"""The protocol without network and clock: nodes, a coordinator and a net that drops, doubles, delays and reorders."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from sentinel import wire
from sentinel.cluster.coordinator import SILENT_SECONDS, Coordinator
from sentinel.cluster.digest import DigestSender, JobSteps
from sentinel.cluster.messages import Beat, ClusterMessage, Digest, Events, NodeState, Pulse, decode, encode
from sentinel.cluster.node import Node
from sentinel.cluster.restart import JobMember
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.runs.steps import RunStep
from sentinel.supervise.supervisor import ORDER_SECONDS

TICK = 0.5
ALERTS = ("Hang", "LossSpike")


def make_case(number: int, alert: str, step: int) -> Case:
    """A case of a node that fires."""
    return Case(
        id=f"0.{number}", run="train", run_id="r", attempt=0, alert=alert, severity="critical", state="firing",
        first_step=step, first_seq=step, step=step, time=float(step), members=(), summary=alert,
        diagnosis=Finding(cause="", confidence="none"), told=True,
    )  # fmt: skip


def own_state() -> NodeState:
    """Of the coordinator's node."""
    return NodeState(node=0, hostname="h", incarnation=1, applied=0, state="alive", silent_seconds=0, attempt=0, step=0)


class Packet(NamedTuple):
    at: float
    order: float
    to: int
    """Number of a node; 0: the coordinator."""
    sender: int
    kind: type[ClusterMessage]
    payload: bytes


class SupervisorMachine:
    """`sentinel run` of a node: it outlives daemons, and every start of its command."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start = 0
        self.fault: wire.JobFault | None = None
        self.ends_at: float | None = None
        """When the last process of an ended start is gone."""
        self.waits_since = 0.0
        self.gone = False
        self.begun: list[str] = []
        """Words of the fault after which each further start was begun."""

    @property
    def report(self) -> wire.JobReport | None:
        if self.gone:
            return None
        return wire.JobReport(start=self.start, attempt=self.start, restarts=99, fault=self.fault)

    @property
    def runs(self) -> bool:
        return not self.gone and self.fault is None

    def end(self, now: float, words: str = "") -> None:
        """The start has ended by itself, or its end was ordered."""
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
            self.start, self.fault = self.start + 1, None
        elif order.does == "stop" and self.fault is not None:
            self.gone = True


def make_step(node: int, seq: int) -> RunStep:
    """A step of a node with two ranks."""
    ranks = {rank: {"loss": seq + rank / 100} for rank in (2 * node, 2 * node + 1)}
    return RunStep(seq, float(seq), ranks, {})


class NodeMachine:
    """A node: its history outlives its daemon, and so do the pages that it sent by itself."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.history: dict[str, Case] = {}
        self.pages: dict[str, str] = {}
        """Case -> state of the page of its own."""
        self.self_told: set[str] = set()
        self.daemon: Node | None = None
        self.starts = 0
        self.sender: DigestSender

    def start(self, now: float) -> None:
        self.starts += 1
        self.sender = DigestSender(self.number, 0, {"loss"})
        self.daemon = Node(self.number, self.starts, now)
        for case in self.history.values():
            self.daemon.record(case)

    def page(self, cases: list[Case]) -> None:
        for case in cases:
            self.pages[case.id] = case.state
            self.self_told.add(case.id)


class Simulation:
    """One seed: a job in which incidents begin and end, and anything dies, for `seconds`; then all is well again."""

    def __init__(self, seed: int, *, nodes: int = 4, deaths: bool = True, cuts: bool = True) -> None:
        self.random = random.Random(seed)
        self.deaths, self.cuts = deaths, cuts
        self.loss, self.delay = self.random.choice([0.0, 0.05, 0.3]), self.random.choice([0.05, 0.5, 3.0])
        self.nodes = {number: NodeMachine(number) for number in range(1, nodes)}
        self.expected = nodes
        self.supervisors = [SupervisorMachine(number) for number in range(nodes)]
        self.heard: dict[int, float] = {}
        """Node -> when the coordinator heard it last."""
        self.order: wire.Order | None = None
        self.decided: set[tuple[int, int]] = set()
        """Epoch and start of each order to begin."""
        self.faults_of_jobs = 0
        self.now, self.step, self.epochs, self.cases = 0.0, 0, 0, 0
        self.net: list[Packet] = []
        self.cut: set[int] = set()
        self.coordinator: Coordinator | None = None
        self.trained = 0
        """Steps that all ranks have done."""
        self.steps = JobSteps(0, nodes)
        """What the present coordinator makes of them."""
        self.judged: list[RunStep] = []
        """The same, judged."""
        self.pages: dict[str, Case] = {}
        """What the job's receivers know, by id: they outlive the coordinator."""
        self.told: set[tuple[int, str]] = set()
        """Cases by node and id that a coordinator paged."""
        self.ids: dict[tuple[str, int], set[str]] = {}
        """Fault -> the ids under which it was paged as firing."""
        self.faults: dict[tuple[int, str], tuple[str, int]] = {}
        """Node and case -> the fault that it is of."""
        self._fault: tuple[str, int] | None = None
        for node in self.nodes.values():
            node.start(0.0)
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.epochs += 1
        self.heard = {}
        self.steps, self.judged = JobSteps(0, self.expected), []
        self.coordinator = Coordinator(
            0, self.expected, self.epochs, self.now, [page for page in self.pages.values() if page.state == "firing"]
        )

    def play(self, seconds: float = 150.0) -> None:
        """Trouble for so long, and then a minute and a half without any."""
        while self.now < seconds:
            self.turn()
            self.trouble()
        self.loss, self.delay, self.cut = 0.0, 0.05, set()
        if self.coordinator is None:
            self.start_coordinator()
        for node in self.nodes.values():
            if node.daemon is None:
                node.start(self.now)
        until = self.now + 90.0
        while self.now < until:
            self.turn()

    def trouble(self) -> None:
        """A fault begins on some nodes or ends; a link, a daemon, the coordinator go or come back."""
        chance = self.random.random
        if self._fault is None and chance() < 0.06:
            self.step += 10
            self._fault = (self.random.choice(ALERTS), self.step)
        elif self._fault is not None and chance() < 0.04:
            self.end_fault()
        if self._fault is not None and chance() < 0.3:
            self.fire(self.random.choice([*self.nodes.values()]), self._fault)
        if chance() < 0.02:
            self.break_job(self.random.choice(self.supervisors))
        if self.cuts and chance() < 0.02:
            self.cut.symmetric_difference_update({self.random.choice([*self.nodes])})
        if not self.deaths:
            return
        if chance() < 0.02:
            node = self.random.choice([*self.nodes.values()])
            if node.daemon is None:
                node.start(self.now)
            else:
                node.daemon = None
        if chance() < 0.02:
            if self.coordinator is None or chance() < 0.5:
                self.start_coordinator()  # while beats of the former are on their way
            else:
                self.coordinator = None
        if chance() < 0.001:
            self.random.choice(self.supervisors).gone = True

    def break_job(self, supervisor: SupervisorMachine) -> None:
        """Its rank dies; those of other nodes fail by that, or stand."""
        if supervisor.runs:
            self.faults_of_jobs += 1
            supervisor.end(self.now, f"RankLost {self.faults_of_jobs}")

    def follow_jobs(self) -> None:
        """Processes that are being ended, and starts that are alone, come to their end; nobody waits for ever."""
        for one in self.supervisors:
            alone = any(other.gone for other in self.supervisors)
            if one.runs and one.ends_at is not None and self.now >= one.ends_at:
                one.end(self.now)
            elif one.runs and alone and self.random.random() < 0.1:
                self.break_job(one)
            elif one.fault is not None and self.now - one.waits_since > ORDER_SECONDS:
                one.gone = True

    def carry_out(self, number: int, order: wire.Order | None) -> None:
        """A node has an order: what never may be carried out, is not."""
        supervisor = self.supervisors[number]
        if order is None:
            return
        begins = order.does == "begin" and order.start == supervisor.start and not supervisor.gone
        if begins:
            assert supervisor.fault is not None
            for one in self.supervisors:
                assert one.gone or one.start > order.start or one.fault is not None, "begun while another node runs"
        supervisor.carry_out(order, self.now, self.random.uniform(0.0, 20.0))

    def order_nodes(self) -> None:
        """What the coordinator orders: not without more than half of the nodes, and to begin not without all."""
        assert self.coordinator is not None
        self.order = self.coordinator.order_nodes(JobMember(own_state(), self.supervisors[0].report), self.now)
        fresh = 1 + sum(self.now - heard <= SILENT_SECONDS for heard in self.heard.values())
        if self.order is not None:
            assert 2 * fresh > self.expected, "an order of a minority"
            decided = (self.coordinator.epoch, self.order.start)
            if self.order.does == "begin" and decided not in self.decided:
                self.decided.add(decided)
                assert fresh == self.expected, "begun without a node"
        self.carry_out(0, self.order)

    def fire(self, node: NodeMachine, fault: tuple[str, int]) -> None:
        open_here = any(case.alert == fault[0] and case.state == "firing" for case in node.history.values())
        if node.daemon is None or open_here:
            return
        self.cases += 1
        case = make_case(self.cases, *fault)
        self.faults[node.number, case.id] = fault
        self.change(node, case)

    def end_fault(self) -> None:
        """On all nodes whose daemon is there; where it is not, its next one finds the end in no step."""
        self._fault = None
        self.step += 5
        for node in self.nodes.values():
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
        self.send(node.number, 0, node.daemon.record(case))

    def send(self, sender: int, to: int, message: ClusterMessage) -> None:
        for _ in range(2 if self.random.random() < self.loss else 1):
            if self.random.random() >= self.loss:
                at = self.now + self.random.uniform(0.0, self.delay)
                self.net.append(Packet(at, self.random.random(), to, sender, type(message), encode(message)))

    def turn(self) -> None:
        self.now += TICK
        arrived = sorted(packet for packet in self.net if packet.at <= self.now)
        self.net = [packet for packet in self.net if packet.at > self.now]
        for packet in arrived:
            if not {packet.sender, packet.to} & self.cut:
                self.arrive(packet)
        self.follow_jobs()
        self.train()
        for node in self.nodes.values():
            if (daemon := node.daemon) is not None:
                node.page(daemon.take_untold(self.now))
                self.carry_out(node.number, daemon.find_order(self.now))
                self.send(node.number, 0, self.pulse(daemon))
        if self.coordinator is not None:
            for number, after in self.coordinator.list_missing(self.now):
                self.ask(number, after)
            self.tell()
            self.order_nodes()
            self.judge_steps()
            digested = {str(node): upto for node, upto in self.steps.reached.items()}
            for number in self.nodes:
                beat = self.coordinator.make_beat(own_state(), self.now, order=self.order)
                self.send(0, number, msgspec.structs.replace(beat, digested=digested))

    def train(self) -> None:
        """All ranks do a step; the daemons that are there see it."""
        seq, self.trained = self.trained, self.trained + 1
        if self.coordinator is not None:
            self.steps.add_own(make_step(0, seq), self.now)
        for node in self.nodes.values():
            if node.daemon is not None:
                node.sender.add(make_step(node.number, seq))
                if (digest := node.sender.make_digest(self.now)) is not None:
                    self.send(node.number, 0, digest)

    def judge_steps(self) -> None:
        """What is judged is what the ranks said, each step once and in order."""
        for step in self.steps.take_closed(self.now):
            assert not self.judged or step.seq > self.judged[-1].seq
            assert all(values == {"loss": step.seq + rank / 100} for rank, values in step.ranks.items())
            nodes = {rank // 2 for rank in step.ranks}
            missing = set(range(self.expected)) - nodes
            assert missing.isdisjoint(self.steps.list_awaited()), "judged without a node that was waited for"
            self.judged.append(step)

    def pulse(self, daemon: Node) -> Pulse:
        epoch = daemon.beat.epoch if daemon.beat else 0
        return Pulse(
            node=daemon.node, incarnation=daemon.incarnation, hostname="h", attempt=0, step=0, last=daemon.last,
            epoch=epoch, job=self.supervisors[daemon.node].report,
        )  # fmt: skip

    def ask(self, number: int, after: int) -> None:
        """A query: there and back, either of which may be lost."""
        daemon = self.nodes[number].daemon
        if daemon is not None and number not in self.cut and self.random.random() >= self.loss:
            self.send(number, 0, daemon.list_events(after))

    def arrive(self, packet: Packet) -> None:
        message = decode(packet.payload, packet.kind)
        if packet.to == 0 and self.coordinator is not None:
            if isinstance(message, Pulse):
                self.heard[message.node] = self.now
                self.coordinator.take_pulse(message, self.now)
            elif isinstance(message, Events):
                self.coordinator.take_events(message)
                self.tell()
            elif isinstance(message, Digest):
                self.steps.take(message, self.now)
        elif packet.to != 0 and isinstance(message, Beat):
            node = self.nodes[packet.to]
            if node.daemon is not None:
                known = node.daemon.beat
                applied = node.daemon.take_beat(message, self.now)
                assert known is None or node.daemon.beat is None or node.daemon.beat.epoch >= known.epoch
                if node.daemon.beat is message:
                    node.sender.confirm(message.digested.get(str(node.number), -1), self.now)
                self.carry_out(node.number, node.daemon.find_order(self.now))
                for identity in applied:
                    if node.pages.get(identity) == "firing":
                        node.pages[identity] = "resolved"

    def tell(self) -> None:
        assert self.coordinator is not None
        for case in self.coordinator.take_changes(self.now):
            self.pages[case.id] = case
            if case.state == "firing":
                self.ids.setdefault((case.alert, case.first_step), set()).add(case.id)
        self.told |= {key for one in self.coordinator.incidents if one.id in self.pages for key in one.cases}
