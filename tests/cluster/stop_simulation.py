"""Simulates a job whose ranks are stopped by alerts; each node has one rank, which outlives its daemons."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from sentinel import wire
from sentinel.actions.rollback import RESTORE_SECONDS
from sentinel.actions.rollback_state import Outcome
from sentinel.actions.stop import StopAction
from sentinel.cluster.protocol.coordinator import SILENT_SECONDS
from sentinel.cluster.protocol.messages import Beat, Pulse
from sentinel.cluster.protocol.node import Node
from sentinel.cluster.protocol.relay import RelayedRollback
from sentinel.cluster.protocol.rollback import JobRollbacks
from sentinel.diagnose.case import Case
from sentinel.runs import ARRIVAL_SECONDS, Attempt
from tests.cluster.simulation import LeadMachine, NodeMachine, Simulation, make_case

VERDICT_SECONDS = 10.0
"""How long a rank waits for the verdict, and again for the other ranks, as in `hooks/rollback/step_guard.py`."""
STOP_SECONDS = 40.0
"""Seconds in which all leave once all is well: a new coordinator, three tries of 5 s, and one try of the ranks."""


class RankMachine:
    """A rank that promises to stop at a step, waits there for the verdict, and leaves if all ranks are ready."""

    def __init__(self, number: int, ballot: dict[int, str], said: dict[int, set[int]]) -> None:
        """Add a rank; by promise, `ballot` has the decision, written once, and `said` the ranks that are ready."""
        self.number, self._ballot, self._said = number, ballot, said
        self.exited = -1
        self.bound: wire.Prepare | None = None
        self.verdict: wire.Commit | None = None
        self.voting: wire.Prepare | None = None
        self.left: wire.Prepare | None = None
        self.promised: set[int] = set()
        self._since: float | None = None
        """When it reached the step of its promise."""

    @property
    def stands(self) -> bool:
        """Whether it does no step; ranks that train on wait for it in a collective."""
        at_step = self.bound is not None and self.bound.at <= self.exited
        return at_step or self.voting is not None or self.left is not None

    def prepare(self, message: wire.Prepare) -> wire.Prepared | None:
        """Return its answer to a Prepare; None: no answer, because it is bound by another order."""
        if self.left is not None:
            return wire.Prepared(id=message.id, ok=False, seq=self.exited, reason="the run is detached")
        if self.voting is not None or self.bound is not None:
            return None
        if message.at <= self.exited:
            return wire.Prepared(id=message.id, ok=False, seq=self.exited)
        self.bound, self.verdict, self._since = message, None, None
        self.promised.add(message.id)
        return wire.Prepared(id=message.id, ok=True, seq=self.exited)

    def decide(self, message: wire.Commit | wire.Abort) -> None:
        """Take the verdict on its promise."""
        if self.bound is None or self.bound.id != message.id:
            return
        if isinstance(message, wire.Commit):
            self.verdict = message
        else:
            self.bound = None

    def turn(self, now: float, ranks: int) -> wire.RolledBack | None:
        """Let half a second pass; return the outcome of a promise that has ended, or None."""
        if self.bound is not None and self.bound.at <= self.exited:
            self._since = now if self._since is None else self._since
            if self.verdict is not None:
                self.voting, self.bound, self._since = self.bound, None, now
                self._said.setdefault(self.voting.id, set()).add(self.number)
            elif now - self._since > VERDICT_SECONDS:
                promise, self.bound = self.bound, None
                self._ballot.setdefault(promise.id, "no verdict")
                return self._answer(promise, "no verdict")
        if (promise := self.voting) is None:
            return None
        if len(self._said[promise.id]) == ranks:
            self._ballot.setdefault(promise.id, "")
        elif self._since is not None and now - self._since > VERDICT_SECONDS:
            self._ballot.setdefault(promise.id, "not all came")
        if promise.id not in self._ballot:
            return None
        self.voting, reason = None, self._ballot[promise.id]
        self.left = promise if not reason else None
        return self._answer(promise, reason)

    def _answer(self, promise: wire.Prepare, reason: str) -> wire.RolledBack:
        return wire.RolledBack(id=promise.id, ok=not reason, to=promise.to, at=promise.at, seconds=0.0, reason=reason)


class StopMachine:
    """The part of a node's daemon that stops runs, and what its history keeps of it."""

    def __init__(self, simulation: StopSimulation, number: int) -> None:
        self._simulation, self.number = simulation, number
        self.cases: list[Case] = []
        """Cases that asked for a stop."""
        self.daemon: Node | None = None
        self.relay: RelayedRollback

    def restart(self, daemon: Node | None, now: float) -> None:
        """Let a new daemon take up what the last one did not end. None: there is no daemon."""
        self.daemon = daemon
        rank = self._simulation.ranks[self.number]
        identity = wire.Identity(
            run="r", run_id="r", rank=self.number, world_size=self._simulation.expected, local_world_size=1,
            node=self.number, pid=1, session="s",
        )  # fmt: skip
        self._attempt = Attempt(0, now)
        hello = wire.Hello(version="t", identity=identity, takes_stop=True, next_seq=rank.exited + 1)
        self._rank = self._attempt.hello(hello, now)
        self.relay = RelayedRollback(self._attempt, self, self, self)
        self.stop = StopAction(self.relay, self)
        self._begun = now
        self._interrupted = [case for case in self.cases if not case.done or case.done[-1].startswith("stopping")]
        if rank.bound is not None:
            self.relay.rejoin_rank(self.number, rank.bound.id)

    @property
    def is_awaiting(self) -> bool:
        """Whether the outcome of any case is still open."""
        return any(not case.done or case.done[-1].startswith("stopping") for case in self.cases)

    def call(self, now: float) -> None:
        """Fire a rule that asks for a stop."""
        self.cases.append(make_case(len(self.cases) + 1, "TooHigh", int(now)))
        self.stop.act_on(self.cases[-1], now)

    def tick(self, now: float) -> None:
        """Act once per turn, while there is a daemon."""
        rank = self._simulation.ranks[self.number]
        self._rank.last_seq = rank.exited
        if rank.left is not None and self._rank.state == "live":
            self._rank.state = "gone"
            self.relay.drop_rank(self.number, now)
        if now - self._begun > ARRIVAL_SECONDS:
            interrupted, self._interrupted = self._interrupted, []
            for case in interrupted:
                case.done = ()
                self.stop.act_on(case, now)
        self.relay.tick(now)
        self.stop.tick(now)

    # Stands in for the rank's connection, the incidents, and the receiver of the outcome.

    def send(self, rank: int, message: wire.Message) -> None:
        if self.daemon is None:
            return
        match message:
            case wire.Prepare():
                if (answer := self._simulation.ranks[rank].prepare(message)) is not None:
                    self.relay.add_promise(rank, answer, 0.0)
            case wire.Commit():
                every = self._simulation.ranks
                assert all(message.id in one.promised for one in every), "a commit without all promises"
                self._simulation.ranks[rank].decide(message)
            case wire.Abort():
                self._simulation.ranks[rank].decide(message)
            case _:
                raise AssertionError(message)

    def interrupt(self, process: int, signal: int) -> bool:
        return False

    def list_asking(self, action: str) -> Iterator[Case]:
        return iter(())

    def record_change(self, case: Case) -> None: ...

    def preserve(self) -> None: ...

    def pass_on(self) -> None: ...

    def will_stop(self, case: Case) -> bool:
        return False

    def end_rollback(self, case: Case, outcome: Outcome) -> None: ...

    def follow_rollback(self, cases: list[Case], outcome: Outcome, done: str) -> None:
        assert outcome.stops
        assert self._simulation.ranks[self.number].left is not None


class StopSimulation(Simulation):
    """A simulation in which alerts stop the run while anything but ranks may die. No attempt ends."""

    def __init__(self, seed: int, *, nodes: int = 4, candidates: int = 3, deaths: bool = True) -> None:
        super().__init__(seed, nodes=nodes, candidates=candidates, deaths=deaths)
        self._chance = random.Random(f"stops {seed}")
        ballot, said = dict[int, str](), dict[int, set[int]]()
        self.ranks = [RankMachine(number, ballot, said) for number in range(nodes)]
        self.stops = [StopMachine(self, number) for number in range(nodes)]
        self._prepared: set[int] = set()

    def call_stop(self) -> None:
        """Fire a rule on a node that has a daemon."""
        there = [one for one in self.stops if one.daemon is not None]
        if there:
            node = self._chance.choice(there)
            node.call(self.nodes[node.number].clock(self.now))

    def trouble(self) -> None:
        super().trouble()
        if self._chance.random() < 0.03:
            self.call_stop()

    def break_job(self, supervisor: object) -> None: ...

    def turn(self) -> None:
        for machine, stop in zip(self.nodes, self.stops, strict=True):
            if stop.daemon is not machine.daemon:
                stop.restart(machine.daemon, machine.clock(self.now))
        super().turn()
        for machine, stop, rank in zip(self.nodes, self.stops, self.ranks, strict=True):
            answer = rank.turn(self.now, self.expected)
            if answer is not None and machine.daemon is not None and machine.daemon is stop.daemon:
                stop.relay.add_restore_result(rank.number, answer, machine.clock(self.now))
        self._check_ranks()

    def _check_ranks(self) -> None:
        """Check that a rank leaves only by the decision of all, which the others read in their next turn."""
        left = next((rank.left for rank in self.ranks if rank.left is not None), None)
        if left is not None:
            assert all(left in (rank.left, rank.voting) for rank in self.ranks), "a rank left alone"

    def train(self) -> None:
        if any(rank.stands for rank in self.ranks):
            return
        super().train()
        for rank in self.ranks:
            rank.exited = self.trained - 1

    def serve(self, node: NodeMachine, daemon: Node) -> None:
        stop, now = self.stops[node.number], node.clock(self.now)
        if stop.daemon is daemon:
            joined = daemon.find_view(now) == "joined" and daemon.beat is not None
            stop.relay.apart = "" if joined else "the coordinator is not heard"
            stop.tick(now)
        super().serve(node, daemon)

    def pulse(self, node: NodeMachine, daemon: Node) -> Pulse:
        stop, pulse = self.stops[node.number], super().pulse(node, daemon)
        return msgspec.structs.replace(pulse, rollback=stop.relay.report()) if stop.daemon is daemon else pulse

    def make_beat(self, node: NodeMachine, lead: LeadMachine) -> Beat:
        beat, now, relay = super().make_beat(node, lead), node.clock(self.now), self.stops[node.number].relay
        if not lead.coordinator.is_acting(now):
            return beat
        if lead.rollbacks is None:
            identity = wire.Identity(
                run="r", run_id="r", rank=node.number, world_size=self.expected, local_world_size=1,
                node=node.number, pid=1, session="s",
            )  # fmt: skip
            lead.rollbacks = JobRollbacks(0, identity, self.expected, relay.done, relay.agreed_stop_reason)
        for known in lead.coordinator.nodes.values():
            lead.rollbacks.take_node(known.state(now), known.pulse.rollback, now)
        lead.rollbacks.advance(now)
        order = lead.rollbacks.make_order()
        if order is not None and isinstance(order.message, wire.Prepare) and order.message.id not in self._prepared:
            self._prepared.add(order.message.id)
            assert self.find_acting() is lead
            fresh = sum(self.now - heard <= SILENT_SECONDS + 1.0 for heard in lead.heard.values())
            assert 2 * fresh > self.expected, "an order of a minority"
        return msgspec.structs.replace(beat, rollback=order)

    def follow(self, node: NodeMachine, daemon: Node, beat: Beat) -> None:
        super().follow(node, daemon, beat)
        stop = self.stops[node.number]
        if daemon.beat is beat and stop.daemon is daemon and daemon.find_view(node.clock(self.now)) == "joined":
            stop.relay.take_order(beat.rollback, node.clock(self.now))

    def play(self, seconds: float = 150.0) -> None:
        """Play as any simulation; then call a stop if the ranks are still there, and wait until they have left."""
        super().play(seconds)
        until = self.now + RESTORE_SECONDS  # an order ends by then if a rank's answer was lost with its daemon
        while self.now < until and any(node.is_awaiting for node in self.stops):
            self.turn()
        if all(rank.left is None for rank in self.ranks):
            self.call_stop()
        until = self.now + STOP_SECONDS
        while self.now < until:
            self.turn()
