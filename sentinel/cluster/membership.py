"""One run's place in its job: the protocol, a session, and the run's way to its receivers, put together.

Stands between the run's notifier and its pipeline. The coordinator's node puts into it the incidents of the job; the
others put nothing into theirs while they hear the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from sentinel import wire
from sentinel.cluster.coordinator import Coordinator
from sentinel.cluster.inquiry import Inquiry
from sentinel.cluster.job_incident import CauseFinder
from sentinel.cluster.messages import (
    Beat,
    ClusterMessage,
    Digest,
    Events,
    NodeRollback,
    NodeState,
    Pulse,
    RollbackOrder,
    WorkReport,
    decode,
    encode,
)
from sentinel.cluster.node import Node
from sentinel.cluster.questions import IncidentView
from sentinel.cluster.relay import RelayedRollback
from sentinel.cluster.restart import JobMember
from sentinel.cluster.rollback import JobRollbacks
from sentinel.cluster.work import WorkExchange, find_work_elsewhere
from sentinel.config.cluster import Meeting
from sentinel.diagnose.case import Case
from sentinel.errors import ProtocolError
from sentinel.notify.notifier import Notifier
from sentinel.runs import Run

if TYPE_CHECKING:
    from sentinel.cluster.session import Session

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
CONNECT_AGAIN_SECONDS = 2.0
LAST_SECONDS = 5.0
"""For which a node whose ranks are gone waits for the coordinator to take its last events, and the coordinator for the
other nodes to leave."""
REMEMBERED_SECONDS = 600.0
"""A daemon that was restarted hands in cases that ended since: the last one may not have."""
NOT_INSTALLED = (
    "the nodes of this job cannot meet: pip install 'training-sentinel[cluster]'; each node is watched alone"
)


class NodeSupervisor(NamedTuple):
    """The `sentinel run` that has the job's ranks on this node."""

    find_report: Callable[[], wire.JobReport | None]
    """How the job stands here; None: no supervisor says."""
    give_order: Callable[[wire.Order], None]


class StepReporter(Protocol):
    """Has the coordinator judge this node's steps, as long as it is heard."""

    @property
    def unconfirmed(self) -> bool:
        """Whether the coordinator does not have all steps yet."""

    def make_digest(self, now: float) -> Digest | None:
        """What is to be sent now."""

    def confirm(self, upto: int, now: float) -> None:
        """The coordinator has all up to this step; -1: nothing."""

    def tick(self, now: float, *, joined: bool) -> None:
        """Once a second. `joined`: whether the coordinator is heard, or was a moment ago."""


class JobJudge(Protocol):
    """Judges the steps of all nodes."""

    def take_digest(self, digest: Digest, now: float) -> None:
        """Steps of another node. Raises ProtocolError."""

    def list_reached(self) -> Mapping[int, int]:
        """Node -> the last step that it need not send again."""

    def tick(self, now: float) -> None:
        """Once a second."""

    def finish(self, now: float) -> None:
        """The run is over: judge what is there."""


def count_nodes(identity: wire.Identity) -> int:
    """Nodes that the job has ranks on, as far as the launcher says."""
    return -(-identity.world_size // (identity.local_world_size or identity.world_size))


def own_name(run_id: str, node: int) -> str:
    """Run id under which a node that hears no coordinator tells people: a page of its own, beside the job's."""
    return f"{run_id}@node-{node}" if node else run_id


class Membership:
    """Of one run. Lives in the daemon's event loop; the session's threads hand over to it."""

    def __init__(
        self,
        run: Run,
        notifier: Notifier,
        identity: wire.Identity,
        meeting: Meeting,
        list_cases: Callable[[], Iterable[Case]],
        tell: Callable[[str], None],
        supervisor: NodeSupervisor,
        find_relay: Callable[[], RelayedRollback | None],
    ) -> None:
        """`list_cases`: those of this node. `tell` prints one line on the training terminal. `find_relay` gives what
        passes orders to the ranks of the present attempt. Sets `notifier.outlet`."""
        now, started = time.monotonic(), int(time.time() * 1000)
        self._run, self._notifier, self._list_cases, self._tell = run, notifier, list_cases, tell
        self._supervisor, self._find_relay = supervisor, find_relay
        self._rollbacks: JobRollbacks | None = None
        """Of the present attempt, where this node is the coordinator."""
        self._rollback_order: RollbackOrder | None = None
        self._passing = False
        """Whether what is new of a rollback is about to be passed on."""
        self.reporter: StepReporter | None = None
        """Of a node that is not the coordinator."""
        self.judge: JobJudge | None = None
        """Of the coordinator."""
        self.work: WorkExchange | None = None
        self.cause_finder: CauseFinder | None = None
        """Of the coordinator."""
        self._order: wire.Order | None = None
        """The coordinator's, to all nodes."""
        self._meeting, self._name = meeting, own_name(run.run_id, identity.node)
        self._pipeline = notifier.pipeline
        self._pipeline.name_run(self._name)
        self._identity, self.node = identity, identity.node
        expected = count_nodes(identity)
        self._coordinator: Coordinator | None = None
        if identity.node == 0:
            told = [case for entry in self._pipeline.entries for case in entry.cases.values()]
            pages = {case.id: case for case in told if case.state == "firing"}
            self._coordinator = Coordinator(0, expected, started, now, pages.values())
        self._node = Node(identity.node, started, now)
        self._session: Session | None = None
        self.inquiry = Inquiry(lambda: self._session, self._hand_over, self._refuse)
        self._connecting: threading.Thread | None = None
        self._connect_at = 0.0
        self._trouble = ""
        self._refused = 0
        self._said = set[str]()
        self._silenced: dict[str, Case] = {}
        """The job's open incidents, as they were put."""
        self._ending: float | None = None
        """Since when no rank is left."""
        self._loop = asyncio.get_running_loop()
        self._closed = False
        notifier.outlet = self
        for case in list_cases():
            recent = case.state == "firing" or (case.resolved_time or 0.0) > time.time() - REMEMBERED_SECONDS
            if case.told and recent and case.attempt == run.attempt.number:
                self.put(case)
        self._task = self._loop.create_task(self._serve())

    # What the notifier and the daemon's end see of it: an outlet.

    def put(self, case: Case) -> None:
        """A case of this node is new, or changed."""
        if self._coordinator is not None:
            self._coordinator.record(case)
            self._tell_job(time.monotonic())
            return
        events = self._node.record(case)
        if self._session is not None:
            self._session.publish_event(encode(events))
        if self._pipeline.is_known(case.id):  # people know of it by us: of its end, too
            self._pipeline.put(msgspec.structs.replace(case, run_id=self._name))

    def is_known(self, identity: str) -> bool:
        """Whether people are to be told more of a case after a restart."""
        return self._pipeline.is_known(identity)

    def hurry(self) -> None:
        """No rank is left: what waits goes out."""
        now = time.monotonic()
        if self._ending is None:
            self._ending = now
        if self._coordinator is not None:
            self._tell_job(now)
        elif self._node.unapplied and now - self._ending > LAST_SECONDS:
            self._tell_alone(now, leaving=True)
        self._send_digest(now)
        self._pipeline.hurry()

    def pass_on_incidents(self) -> None:
        """More is known of the job's incidents: people are told, as far as they are to know."""
        if self._coordinator is not None and not self._closed:
            self._tell_job(time.monotonic())

    def pass_on_report(self) -> None:
        """The job stands otherwise here: the other nodes are told at once, and what follows is done."""
        self._send()
        self._carry_out_order(time.monotonic())

    def pass_on_rollback(self) -> None:
        """More is known here of a rollback, or one is asked for: passed on once the caller is done."""
        if not self._passing:
            self._passing = True
            self._loop.call_soon(self._pass_on_rollback)

    @property
    def pending(self) -> int:
        """What people do not know yet, or the coordinator; of the coordinator, the nodes that are still there."""
        waits = self._ending is None or time.monotonic() - self._ending < LAST_SECONDS
        if self._coordinator is None:
            unconfirmed = self._session is not None and self.reporter is not None and self.reporter.unconfirmed
            here = self._node.unapplied + unconfirmed if waits else 0
        else:
            states = self._coordinator.list_nodes(time.monotonic())
            here = sum(state.state == "alive" for state in states) if waits else 0
        return self._pipeline.pending + here

    def status(self) -> dict[str, Any]:
        """For `sentinel status`."""
        now = time.monotonic()
        beat = self._node.beat
        if self._coordinator is not None:
            view: str = "coordinator"
            beat = self._coordinator.make_beat(self._state(), now)
        else:
            view = self._node.find_view(now)
        return {
            "node": self._identity.node,
            "view": view,
            "address": f"{self._meeting.host}:{self._meeting.port}",
            "coordinator_silent_seconds": 0.0 if self._coordinator else round(now - self._node.heard, 1),
            "expected": beat.expected if beat else count_nodes(self._identity),
            "nodes": [msgspec.to_builtins(state) for state in beat.nodes] if beat else [],
            "incidents": [msgspec.to_builtins(one) for one in beat.incidents] if beat else [],
            "refused": self._refused,
            "trouble": self._trouble,
        }

    def list_incidents(self) -> list[IncidentView] | None:
        """Those of the job; None on a node that is not the coordinator."""
        return self._coordinator.incidents.list_views() if self._coordinator is not None else None

    async def close(self) -> None:
        """Leave the job: say so, and close the session. What the coordinator does not know, people are told here."""
        if self._closed:
            return
        self._task.cancel()
        if self._connecting is not None:  # a thread that is inside Zenoh when the interpreter ends aborts the process
            await asyncio.to_thread(self._connecting.join, LAST_SECONDS)
        self._closed = True
        now = time.monotonic()
        if self._coordinator is not None:
            if self.judge is not None:
                self.judge.finish(now)
            self._tell_job(now, leaving=True)
        else:
            self._tell_alone(now, leaving=True)
        if self._session is not None:
            self._send(leaving=True)
            session, self._session = self._session, None
            ended = asyncio.Event()

            def end() -> None:
                session.close()
                self._hand_over(ended.set)

            threading.Thread(target=end, daemon=True).start()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LAST_SECONDS)

    async def _serve(self) -> None:
        while True:
            try:
                self._turn(time.monotonic())
            except Exception:
                log.exception("run %s: the other nodes are not heard", self._run.name)
            await asyncio.sleep(BEAT_SECONDS)

    def _turn(self, now: float) -> None:
        if self._session is None:
            self._connect(now)
        if self._run.attempt.live:
            self._ending = None
        self._roll_back(now)
        self._send()
        self._note_work(now)
        self._carry_out_order(now)
        if self._coordinator is None:
            if self.reporter is not None:
                self.reporter.tick(now, joined=self._node.find_view(now) != "alone")
            self._send_digest(now)
            self._tell_alone(now)
            return
        if self.judge is not None:
            self.judge.tick(now)
        if self._session is not None:
            for node, after in self._coordinator.list_missing(now):
                self._session.ask(node, after)
        self._tell_job(now)
        for state in self._coordinator.list_nodes(now):
            self._say_silence(state)

    def _send(self, *, leaving: bool = False) -> None:
        if self._session is None:
            return
        message: ClusterMessage
        if self._coordinator is not None:
            message = self._coordinator.make_beat(
                self._state(), time.monotonic(), leaving=leaving, order=self._order, rollback=self._rollback_order
            )
            reached = self.judge.list_reached() if self.judge is not None else {}
            message = msgspec.structs.replace(message, digested={str(node): upto for node, upto in reached.items()})
        else:
            own = self._state()
            message = Pulse(
                node=own.node, incarnation=own.incarnation, hostname=own.hostname, attempt=own.attempt, step=own.step,
                ranks=own.ranks, last=self._node.last, leaving=leaving,
                epoch=self._node.beat.epoch if self._node.beat else 0, job=self._supervisor.find_report(),
                rollback=self._report_rollback(), work=own.work,
            )  # fmt: skip
        with contextlib.suppress(Exception):  # the next one repeats it
            self._session.publish(encode(message))

    def list_nodes(self) -> tuple[NodeState, ...]:
        """The other nodes, as the coordinator knows them."""
        return self._coordinator.list_nodes(time.monotonic()) if self._coordinator is not None else ()

    def _send_digest(self, now: float) -> None:
        if self._session is None or self.reporter is None:
            return
        if (digest := self.reporter.make_digest(now)) is not None:
            with contextlib.suppress(Exception):  # what does not arrive is sent again
                self._session.publish_digest(encode(digest))

    def _carry_out_order(self, now: float) -> None:
        """Have this node's supervisor do what the coordinator orders now, or know why there is no order."""
        report = self._supervisor.find_report()
        if self._coordinator is not None:
            own = JobMember(self._state(), report)
            order = self._coordinator.order_nodes(own, now)
            if order != self._order:
                self._order = order
                self._send()
            why = f"more than half of the nodes must be heard; missing: {self._coordinator.name_missing(own, now)}"
        else:
            order = self._node.find_order(now)
            why = f"the coordinator at {self._meeting.host}:{self._meeting.port} is not heard"
        if report is None:
            return
        if order is not None and order.start == report.start:
            self._supervisor.give_order(order)
        elif report.fault is not None:
            self._supervisor.give_order(wire.Order(start=report.start, does="wait", why=why))

    def _pass_on_rollback(self) -> None:
        self._passing = False
        if self._coordinator is None:
            self._send()
        else:
            self._roll_back(time.monotonic())

    def _report_rollback(self) -> NodeRollback | None:
        relay = self._find_relay()
        return relay.report() if relay is not None and relay.terms is not None else None

    def _roll_back(self, now: float) -> None:
        """Have this node's ranks told what the coordinator orders; as the coordinator, order it first."""
        relay = self._find_relay()
        if relay is None:
            return
        if self._coordinator is not None:
            relay.apart = ""
            self._lead_rollback(self._coordinator, relay, now)
        elif self._node.find_view(now) == "joined":
            relay.apart, beat = "", self._node.beat
            self._rollback_order = beat.rollback if beat is not None else None
        else:
            relay.apart = f"the coordinator at {self._meeting.host}:{self._meeting.port} is not heard"
            return
        relay.take_order(self._rollback_order, now)

    def _lead_rollback(self, coordinator: Coordinator, relay: RelayedRollback, now: float) -> None:
        number = self._run.attempt.number
        if self._rollbacks is None or self._rollbacks.attempt != number:
            nodes = count_nodes(self._identity)
            self._rollbacks = JobRollbacks(number, self._identity, nodes, relay.done)
        job = self._rollbacks
        for known in coordinator.nodes.values():
            state = known.state(now)
            silence = f"({state.hostname}) has been silent for {state.silent_seconds:.0f} s"
            trouble = {"alive": "", "left": f"({state.hostname}) has left", "silent": silence}[state.state]
            job.take_report(state.node, known.pulse.rollback, trouble, now)
        job.take_report(self._identity.node, self._report_rollback(), "", now)
        job.advance(now)
        if job.armed and (key := f"armed {number}") not in self._said:
            self._said.add(key)
            self._say(f"all {count_nodes(self._identity)} nodes have met: rollback is armed on all ranks")
        if (order := job.make_order()) != self._rollback_order:
            self._rollback_order = order
            self._send()

    def _state(self) -> NodeState:
        attempt = self._run.attempt
        return NodeState(
            node=self._identity.node,
            hostname=self._identity.hostname,
            incarnation=self._node.incarnation,
            applied=self._node.last,
            state="alive",
            silent_seconds=0.0,
            attempt=attempt.number,
            step=attempt.last_seq + attempt.step_offset,
            ranks={str(number): one.last_seq + attempt.step_offset for number, one in sorted(attempt.ranks.items())},
            work=self.work.report(time.monotonic()) if self.work is not None else WorkReport(),
        )

    def _note_work(self, now: float) -> None:
        """Let this node know what the ranks of others do, as far as it hears of them."""
        states, heard = self.list_nodes(), now
        if self._coordinator is None and self._node.beat is not None:
            states, heard = self._node.beat.nodes, self._node.heard
        if self.work is not None:
            self.work.note(*find_work_elsewhere(states, self.node, self._run.attempt.number, heard))

    def _tell_job(self, now: float, *, leaving: bool = False) -> None:
        """The job's incidents that changed, and those of which a silence began or ended."""
        assert self._coordinator is not None
        if self.cause_finder is not None:
            for incident in self._coordinator.take_unexplained(now):
                self.cause_finder.begin(self._coordinator.incidents, incident)
        changed = self._coordinator.take_changes(now, leaving=leaving or self._ending is not None)
        fresh = {case.id for case in changed}
        for case in [*changed, *(case for case in self._silenced.values() if case.id not in fresh)]:
            silence = self._notifier.silences.find_silence(case)
            if case.id in fresh or silence != case.silenced:
                case = msgspec.structs.replace(case, silenced=silence)
                self._pipeline.put(case)
                self._silenced[case.id] = case
            if case.state != "firing":
                self._silenced.pop(case.id, None)

    def _tell_alone(self, now: float, *, leaving: bool = False) -> None:
        for case in self._node.take_untold(now, leaving=leaving):
            self._pipeline.put(msgspec.structs.replace(case, run_id=self._name))

    def _say_silence(self, state: NodeState) -> None:
        key = f"node {state.node}"
        if state.state == "silent" and key not in self._said:
            self._said.add(key)
            self._say(
                f"{key} ({state.hostname}) is silent; its daemon or its link is down. Its last step: {state.step}"
            )
        elif state.state != "silent" and key in self._said:
            self._said.discard(key)
            self._say(f"{key} ({state.hostname}) is heard again" if state.state == "alive" else f"{key} has left")

    def _say(self, text: str) -> None:
        log.warning("run %s: %s", self._run.name, text)
        self._tell(text)

    def _connect(self, now: float) -> None:
        """Try in a thread: where packets are dropped it takes minutes, and the daemon's end must not wait for it."""
        if now < self._connect_at or (self._connecting is not None and self._connecting.is_alive()):
            return
        self._connect_at = now + CONNECT_AGAIN_SECONDS
        self._connecting = threading.Thread(target=self._open, daemon=True, name="cluster")
        self._connecting.start()

    def _open(self) -> None:
        try:
            from sentinel.cluster.session import Session
        except ImportError:
            self._hand_over(self._fail, NOT_INSTALLED)
            return
        try:
            session = Session(
                self._meeting, self._run.run_id, self._identity.node,
                listens=self._coordinator is not None, receive=self._receive, answer=self._answer,
                answer_view=self.inquiry.answer,
            )  # fmt: skip
        except Exception as error:
            verb = "listen on" if self._coordinator is not None else "reach the coordinator at"
            place = f"{self._meeting.host}:{self._meeting.port}"
            log.info("run %s: %s", self._run.name, error)
            self._hand_over(self._fail, f"cannot {verb} {place}, or the secret is another; tried again")
            return
        if not self._hand_over(self._take_session, session):
            session.close()

    def _take_session(self, session: Session) -> None:
        if self._closed:
            threading.Thread(target=session.close, daemon=True).start()
            return
        self._session, self._trouble = session, ""
        self._send()

    def _fail(self, trouble: str) -> None:
        self._trouble = trouble
        if trouble not in self._said and (trouble == NOT_INSTALLED or self._coordinator is not None):
            self._said.add(trouble)
            self._say(trouble)
        if trouble == NOT_INSTALLED:
            self._connect_at = float("inf")

    def _refuse(self, error: ProtocolError) -> None:
        """Count a message that was refused; of the first one is said why."""
        self._refused += 1
        if self._refused == 1:
            self._say(f"a message of another node is refused: {error}")

    def _hand_over(self, function: Callable[..., None], *arguments: object) -> bool:
        """Call it in the daemon's loop; False where that is over."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def _receive(self, kind: str, node: int, payload: bytes) -> None:
        """In a thread of the session's."""
        self._hand_over(self._take, kind, node, payload)

    def _answer(self, after: int, reply: Callable[[bytes], None]) -> None:
        def hand_in() -> None:
            # What was judged here alone ends when a beat is heard: only then the coordinator is handed it, as over.
            if self._node.find_view(time.monotonic()) == "joined":
                reply(encode(self._node.list_events(after)))

        self._hand_over(hand_in)

    def _take(self, kind: str, node: int, payload: bytes) -> None:
        now = time.monotonic()
        try:
            if self._coordinator is None:
                self._take_beat(decode(payload, Beat), now)
            elif kind == "gone":
                self._coordinator.drop_node(node)
            elif kind == "pulse":
                if self._coordinator.take_pulse(_check_sender(decode(payload, Pulse), node), now):
                    self._carry_out_order(now)
                    self._roll_back(now)
            elif kind == "digest":
                digest = _check_sender(decode(payload, Digest), node)
                if self.judge is not None:
                    self.judge.take_digest(digest, now)
            else:
                self._coordinator.take_events(_check_sender(decode(payload, Events), node))
                self._tell_job(now)
        except ProtocolError as error:
            self._refuse(error)

    def _take_beat(self, beat: Beat, now: float) -> None:
        applied = self._node.take_beat(beat, now)
        if self.reporter is not None and self._node.beat is beat:
            self.reporter.tick(now, joined=not beat.leaving)
            self.reporter.confirm(beat.digested.get(str(self._identity.node), -1), now)
        for identity in applied:
            if self._pipeline.is_known(identity):
                self._end_own_page(identity)
        self._carry_out_order(now)
        self._roll_back(now)

    def _end_own_page(self, identity: str) -> None:
        """The coordinator tells people of it now: it has one page, the job's."""
        case = next((case for case in self._list_cases() if case.id == identity), None)
        if case is None:
            return
        self._pipeline.put(
            msgspec.structs.replace(
                case, run_id=self._name, state="resolved", resolved_time=case.resolved_time or time.time(),
                done=(*case.done, "over here: the coordinator is heard again, and tells of it"),
            )
        )  # fmt: skip


def _check_sender(message: Pulse | Events | Digest, node: int) -> Any:
    if message.node != node:
        raise ProtocolError(f"node {node} says that it is node {message.node}")
    return message
