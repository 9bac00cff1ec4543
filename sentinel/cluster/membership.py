"""One run's place in its job: connects the protocol, a session, and the run's notifier and receivers.

It stands between the run's notifier and its pipeline. The coordinator's node puts the incidents of the job into its
pipeline; the others put nothing into theirs while they hear the coordinator.

    every node         -> pulse, events, digests ->    Lead, on the node that is the coordinator
                       <- beat                   <-
The messages of the coordinator's own node take the same way, without the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from sentinel.cluster.connection import Connection
from sentinel.cluster.inquiry import Inquiry
from sentinel.cluster.lead import Lead, restore_blame, restore_pages
from sentinel.cluster.local_run import LocalRun, StepReporter
from sentinel.cluster.orders import NO_ORDERS, NodeOrders
from sentinel.cluster.own_pages import OwnPages
from sentinel.cluster.protocol.coordinator import Coordinator
from sentinel.cluster.protocol.election import check_epoch, check_incarnation, next_epoch
from sentinel.cluster.protocol.job_extent import count_candidates, count_nodes, describe_shrink
from sentinel.cluster.protocol.messages import (
    Beat,
    NodeState,
    OpenIncident,
    Pulse,
    decode,
    encode,
)
from sentinel.cluster.protocol.node import Node
from sentinel.cluster.protocol.questions import IncidentView
from sentinel.cluster.protocol.work import find_work_elsewhere
from sentinel.cluster.rejected_connections import RejectedConnections
from sentinel.config.cluster import Meeting
from sentinel.diagnose.case import Case
from sentinel.errors import ProtocolError
from sentinel.notify.notifier import Notifier
from sentinel.runs import Run

if TYPE_CHECKING:
    from sentinel.cluster.session import NodeQuery, Session

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
NEWS_SECONDS_A_NODE = 0.0005
"""Seconds between two beats with news, for each node of the job: each node may cause news that all must get."""
LAST_SECONDS = 5.0
"""Most seconds that a node without ranks waits for its events to be taken, or as the coordinator for all to leave."""
REMEMBERED_SECONDS = 600.0
"""Seconds: a restarted daemon hands in the cases that ended within them, as its predecessor may not have."""


class Membership:
    """One run's place in its job. Lives in the daemon's event loop; the session's threads hand calls over to it."""

    def __init__(self, run: Run, notifier: Notifier, meeting: Meeting, local: LocalRun) -> None:
        """Begin to look for the other nodes and to send them this node's steps, and set `notifier.outlet`."""
        now, identity = time.monotonic(), local.identity
        self._run, self._notifier, self._local = run, notifier, local
        self._passing = False
        """Whether news of a rollback will be passed on in the next turn of the loop."""
        self._news: asyncio.TimerHandle | None = None
        """Timer until news of the job's incidents is passed on; None: there is none."""
        self._news_at = 0.0
        """When news was last passed on."""
        self._pipeline = notifier.pipeline
        self._first_identity, self.node = identity, identity.node
        self._reporter: StepReporter | None = None
        """Sends this node's steps to the coordinator; None: this node judges the steps of the job."""
        self._node = Node(identity.node, _read_clock(), now, count_candidates(meeting, identity))
        self._node.note_members(identity.members)
        self._own_pages = OwnPages(self._pipeline, self._node, run.run_id, local)
        self._lead: Lead | None = None
        """The coordinator's role; None: this node does not have it."""
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(meeting, identity.node, self, local, self._loop)
        self._orders = NodeOrders(self._node, self._connection, local, self)
        self.inquiry = Inquiry(self._connection, local)
        self._rejected = RejectedConnections(run.name)
        self._said = set[str]()
        """Lines of the coordinator that this node's terminal already has: each is printed once."""
        self._cut_off = False
        """Whether the terminal shows that no coordinator is heard."""
        self._ending: float | None = None
        """Time since when no rank is left."""
        self._closed = False
        notifier.outlet = self
        self._own_pages.withhold()
        for case in local.list_cases():
            recent = case.state == "firing" or (case.resolved_time or 0.0) > time.time() - REMEMBERED_SECONDS
            if case.told and recent and case.attempt == run.attempt.number:
                self.put(case)
        self._reporter = local.report_steps()
        self._task = self._loop.create_task(self._serve())

    def move(self, meeting: Meeting) -> None:
        """Meet the nodes elsewhere: the job was started again, and what had been found out is lost."""
        self._connection.move(meeting)
        self._node.election.candidates = count_candidates(meeting, self._local.identity)

    # The outlet, which the notifier and the end of the daemon use.

    def put(self, case: Case) -> None:
        """Pass on a case of this node that is new, or changed."""
        events = self._node.record(case, paged=self._own_pages.may_be_told(case.id))
        if self._session is not None:
            self._session.publish_event(encode(events))
        if self._lead is not None:
            self._lead.coordinator.take_events(events)
            self._pass_on_news()
        if self.is_known(case.id):  # people know of it from this node: they get its end from here, too
            self._own_pages.put(case)

    def is_known(self, identity: str) -> bool:
        """Whether people know of a case from this node, and must hear more of it after a restart."""
        return self._own_pages.is_known(identity)

    def hurry(self) -> None:
        """Send at once what waits, as no rank is left."""
        now = time.monotonic()
        if self._ending is None:
            self._ending = now
        if self._lead is not None:
            self._lead.tell(now, ending=now - self._ending > LAST_SECONDS)
            self._send_beat(now)
        stays = self._orders.has_supervisor  # this daemon stays: a coordinator may still come
        if self._node.unapplied and now - self._ending > LAST_SECONDS and not stays:
            self._own_pages.tell_alone(now, leaving=True)
        self._send_digest(now)
        self._pipeline.hurry()

    def pass_on_incidents(self) -> None:
        """Notify people of what became known of the job's incidents, as far as it concerns them."""
        self._pass_on_news()

    def pass_on_report(self) -> None:
        """Report a change of the job on this node to the other nodes at once, and do what follows from it."""
        now = time.monotonic()
        self._send_pulse(now)
        if self._lead is not None and self._lead.decide(now):
            self._send_beat(now)
        self._orders.follow(now, self._coordinator)

    def pass_on_rollback(self) -> None:
        """Pass on news of a rollback, or the request for one, once the caller has returned."""
        if not self._passing:
            self._passing = True
            self._loop.call_soon(self._pass_on_rollback)

    def _pass_on_rollback(self) -> None:
        self._passing = False
        self.pass_on_report()

    @property
    def pending(self) -> int:
        """Count of what people or the coordinator do not know yet; as the coordinator, also of nodes still there."""
        waits = self._ending is None or time.monotonic() - self._ending < LAST_SECONDS
        unconfirmed = self._session is not None and self._reporter is not None and self._reporter.unconfirmed
        others = sum(state.state == "alive" for state in self.list_nodes())
        held = self._lead is not None and self._lead.coordinator.incidents.awaits_verdict
        here = self._node.unapplied + unconfirmed + others + held if waits else 0
        return self._pipeline.pending + here

    def status(self) -> dict[str, Any]:
        """Return this node's view of the job for `sentinel status`."""
        now = time.monotonic()
        view: str = "left out" if self._node.is_left_out else self._node.find_view(now)
        beat, members = self._node.recall_beat(now), self._node.members
        if self._lead is not None and self._lead.coordinator.is_acting(now):
            view, beat = "coordinator", self._lead.make_beat(now)
        in_touch = view in ("coordinator", "joined")
        return {
            "node": self.node,
            "view": view,
            "address": self._orders.find_address(),
            "no_orders": "" if self._orders.are_taken else NO_ORDERS,
            "absence": "" if in_touch else self._orders.describe_absence(now, self._coordinator),
            "coordinator_silent_seconds": 0.0 if view == "coordinator" else round(now - self._node.heard, 1),
            "expected": beat.expected if beat else count_nodes(self._local.identity),
            "members": list(members.nodes or range(count_nodes(self._local.identity))),
            "left_out": list(members.left_out),
            "shrunk": describe_shrink(members, self._local.identity.world_size),
            "nodes": [msgspec.to_builtins(state) for state in beat.nodes] if beat else [],
            "incidents": [msgspec.to_builtins(one) for one in beat.incidents] if beat else [],
            "blame": dict(beat.blame) if beat else {},
            "blamed_incidents": beat.blamed_incidents if beat else 0,
            "refused": self._connection.refused,
            "rejected": self._rejected.count,
            "rejected_from": self._rejected.addresses,
            "dropped": self._node.dropped,
            "trouble": self._connection.trouble,
        }

    def list_open_elsewhere(self) -> list[OpenIncident]:
        """Return the job's open incidents in which this node has no part; none where the coordinator is not heard."""
        now = time.monotonic()
        joined = self._node.beat if self._node.find_view(now) == "joined" else None
        beat = self._lead.make_beat(now) if self._lead is not None else joined
        return [one for one in beat.incidents if one.nodes and self.node not in one.nodes] if beat is not None else []

    def list_incidents(self) -> list[IncidentView] | None:
        """Return the incidents of the job; None on a node that is not the coordinator."""
        return self._lead.coordinator.incidents.list_views() if self._lead is not None else None

    def list_nodes(self) -> tuple[NodeState, ...]:
        """Return the other nodes, as the coordinator knows them; none on a node that is not the coordinator."""
        if self._lead is None:
            return ()
        return tuple(one for one in self._lead.coordinator.list_nodes(time.monotonic()) if one.node != self.node)

    @property
    def leader(self) -> int:
        """The coordinator's node; where none is known, the node that should be it."""
        return self._node.election.leader or 0

    async def close(self) -> None:
        """Leave the job and close the session. People are notified from here of what the coordinator does not know."""
        if self._closed:
            return
        self._task.cancel()
        await self._connection.finish_trying()
        self._closed = True
        now = time.monotonic()
        if self._lead is not None:
            if self._lead.judge is not None:
                self._lead.judge.finish(now)
            self._lead.tell(now, ending=True)
            self._send_beat(now, leaving=True)
        self._own_pages.tell_alone(now, leaving=True)
        if self._session is not None:
            self._send_pulse(now, leaving=True)
            await self._connection.close()

    async def _serve(self) -> None:
        while True:
            try:
                self._turn(time.monotonic())
            except Exception:
                log.exception("run %s: the other nodes are not heard", self._run.name)
            await asyncio.sleep(BEAT_SECONDS)

    def _turn(self, now: float) -> None:
        self._connection.tick(now)
        if self._run.attempt.live:
            self._ending = None
        self._change_role(now)
        self._send_pulse(now)
        if self._lead is not None:
            if self._lead.judge is None and self._lead.coordinator.is_acting(now):
                self._begin_judging(self._lead)
            self._lead.tick(now)
            self._lead.decide(now)
            self._send_beat(now)
            self._ask_missing(self._lead, now)
        self._note_work(now)
        self._orders.follow(now, self._coordinator)
        if self._reporter is not None:
            self._reporter.tick(now, joined=self._node.find_view(now) != "alone")
            self._send_digest(now)
        self._own_pages.tell_alone(now)
        self._note_absence(now)
        self._rejected.tick(self._connection.port, now)

    def _note_absence(self, now: float) -> None:
        """Say on the terminal when this node is cut off, and when that is over: a wrong secret has no other sign."""
        cut_off, stays = self._node.is_cut_off(now), self._ending is None and not self._node.is_left_out
        if cut_off and stays and not self._cut_off:
            why = self._orders.describe_absence(now, self._coordinator)
            self._local.tell(f"{why}: this node sends its own alerts itself; see `sentinel status`")
        elif self._cut_off and stays and not cut_off:
            self._local.tell("the other nodes are heard again")
        self._cut_off = cut_off and stays

    def _change_role(self, now: float) -> None:
        """Become the coordinator where none is heard, and give the role up where this node cannot act in it."""
        if self._lead is not None:
            self._node.note_members(self._lead.coordinator.members)
        if self._node.is_left_out:
            self.leave_role()
        elif self._lead is None and self._session is not None and self._node.election.is_due(now):
            epoch = next_epoch(self._node.election.epoch, self.node, _read_clock())
            beat = self._node.recall_beat(now)
            pages = restore_pages(beat.incidents, self._run.name, self._run.run_id) if beat is not None else []
            members, count = self._node.members, count_nodes(self._first_identity)
            blame = restore_blame(beat) if beat is not None else None
            earlier = beat.nodes if beat is not None else ()
            coordinator = Coordinator(self.node, members.count(count), epoch, now, pages, members, blame, earlier)
            self._lead = Lead(self._run, self._notifier, self._local, self._orders, coordinator, self._said)
            self._session.lead()
        elif self._lead is not None and self._lead.coordinator.has_failed(now) and self._node.election.candidates > 1:
            self.leave_role()

    def _begin_judging(self, lead: Lead) -> None:
        """Begin to judge, as this node acts as the coordinator for the first time since it has the role."""
        self._reporter = None
        self._own_pages.take_up()
        log.info("run %s: node %d is the coordinator", self._run.name, self.node)
        lead.judge = self._local.judge_steps()

    def leave_role(self) -> None:
        """Give the coordinator's role up, if this node has it."""
        if self._lead is None:
            return
        lead, self._lead = self._lead, None
        self._node.election.release(time.monotonic())
        if self._session is not None:
            self._session.follow()
        if lead.judge is not None:
            self._own_pages.withhold()
            self._reporter = self._local.report_steps()
            log.info("run %s: node %d is the coordinator no more", self._run.name, self.node)

    def _send_pulse(self, now: float, *, leaving: bool = False) -> None:
        attempt, election, report = self._run.attempt, self._node.election, self._orders.find_report()
        pulse = Pulse(
            node=self.node, incarnation=self._node.incarnation, hostname=self._local.identity.hostname,
            attempt=attempt.number, step=attempt.last_seq + attempt.step_offset,
            ranks={str(number): one.last_seq + attempt.step_offset for number, one in sorted(attempt.ranks.items())},
            last=self._node.last, epoch=election.epoch, stamp=election.stamp, leaving=leaving,
            ended=leaving and not attempt.live and self._orders.has_completed,
            job=report, last_job=self._orders.last_report if report is None else None,
            rollback=self._orders.report_rollback(),
            work=self._local.report_work(now),
        )  # fmt: skip
        if self._lead is not None:
            self._lead.coordinator.take_pulse(pulse, now)
        if self._session is not None:
            with contextlib.suppress(Exception):  # the next one repeats it
                self._session.publish_pulse(encode(pulse))

    def _send_beat(self, now: float, *, leaving: bool = False) -> None:
        """Send the coordinator's beat to all nodes, and follow it here."""
        assert self._lead is not None
        beat = self._lead.make_beat(now, leaving=leaving)
        if self._session is not None:
            with contextlib.suppress(Exception):  # the next one repeats it
                self._session.publish_beat(encode(beat))
        self._follow_beat(beat, now)

    def _pass_on_news(self) -> None:
        """As the coordinator, pass news on to people and all nodes; what comes in quick succession goes together."""
        if self._news is None and self._lead is not None and not self._closed:
            gap = NEWS_SECONDS_A_NODE * self._lead.coordinator.expected
            self._news = self._loop.call_later(max(self._news_at + gap - time.monotonic(), 0.0), self._tell_news)

    def _tell_news(self) -> None:
        self._news, self._news_at = None, time.monotonic()
        if self._lead is not None and not self._closed:
            self._lead.tell(self._news_at)
            self._send_beat(self._news_at)

    def _note_work(self, now: float) -> None:
        """Note what the ranks of other nodes do, as far as this one hears of them."""
        if self._lead is not None:
            states, heard = self._lead.coordinator.list_nodes(now), now
        else:
            beat = self._node.beat if self._node.find_view(now) == "joined" else None
            states, heard = beat.nodes if beat is not None else (), self._node.heard
        self._local.note_work_elsewhere(*find_work_elsewhere(states, self.node, self._run.attempt.number, heard))

    def _ask_missing(self, lead: Lead, now: float, among: Iterable[int] | None = None) -> None:
        """Ask nodes for the events that the coordinator misses. `among`: only these nodes; None: all."""
        for node, after in lead.coordinator.list_missing(now, among):
            if node == self.node:
                lead.coordinator.take_events(self._node.list_events(after))
            elif self._session is not None:
                self._session.ask(node, after)

    def _send_digest(self, now: float) -> None:
        if self._session is None or self._reporter is None or (digest := self._reporter.make_digest(now)) is None:
            return
        with contextlib.suppress(Exception):  # a digest that does not arrive is sent again
            self._session.publish_digest(encode(digest))

    @property
    def _coordinator(self) -> Coordinator | None:
        return self._lead.coordinator if self._lead is not None else None

    @property
    def _session(self) -> Session | None:
        return self._connection.session

    # The connection's owner.

    def open_session(self, meeting: Meeting) -> Session:
        """Return an open session. Called in a thread."""
        from sentinel.cluster.session import Session  # it imports Zenoh

        return Session(meeting, self._run.run_id, self.node, self)

    def begin_session(self, session: Session) -> None:
        """Begin to use a session that is new."""
        if self._lead is not None:
            session.lead()
        self._send_pulse(time.monotonic())

    # The session's listener, called in threads.

    def receive(self, kind: str, node: int, payload: bytes) -> None:
        """Take a message of another node."""
        self._connection.call_in_loop(self._take, kind, node, payload)

    def answer_events(self, after: int, query: NodeQuery) -> None:
        """Answer with this node's events after number `after`."""
        self._connection.call_in_loop(self._hand_in, after, query)

    def answer_question(self, question: bytes, query: NodeQuery) -> None:
        """Answer another node's question."""
        self.inquiry.answer(question, query)

    def refuse(self, error: ProtocolError) -> None:
        """Count a message that is refused."""
        self._connection.call_in_loop(self._connection.refuse, error)

    def note_link(self, locator: str) -> None:
        """Take note that a link to an accepted node began or ended."""
        self._connection.call_in_loop(self._rejected.note_link, locator, time.monotonic())

    def _hand_in(self, after: int, query: NodeQuery) -> None:
        # What was judged here alone ends when a beat is heard. Only then the coordinator gets it, as ended.
        if self._node.find_view(time.monotonic()) == "joined":
            query.reply(encode(self._node.list_events(after)))

    def _take(self, kind: str, node: int, payload: bytes) -> None:
        now = time.monotonic()
        # A message of this node, of a second one with its number, whose events would pass for ours, or of one left out.
        if node == self.node or not self._node.members.has(node):
            return
        try:
            if kind == "beat":
                self._take_beat(decode(payload, Beat), node, now)
            elif self._lead is not None and self._lead.take(kind, node, payload, now):
                self._pass_on_news()
                self._ask_missing(self._lead, now, [node])
        except ProtocolError as error:
            self._connection.refuse(error)

    def _take_beat(self, beat: Beat, node: int, now: float) -> None:
        """Take the beat of another node. Raises ProtocolError."""
        if beat.node != node:
            raise ProtocolError(f"node {node} says that it is node {beat.node}")
        check_epoch(beat.epoch, time.time())
        for state in beat.nodes:
            if state.node == self.node:  # this node would set its own above it
                check_incarnation(state.incarnation, time.time())
        if self._lead is not None:
            if not self._lead.coordinator.yields_to(beat, now):
                return
            self.leave_role()
        self._follow_beat(beat, now)
        if beat.acting and self._node.beat is beat and not self._node.has_pages:
            self._own_pages.forget()

    def _follow_beat(self, beat: Beat, now: float) -> None:
        applied = self._node.take_beat(beat, now)
        if self._node.beat is not beat:
            return
        if self._reporter is not None and beat.acting and beat.node != self.node:
            self._reporter.tick(now, joined=not beat.leaving)
            self._reporter.confirm(beat.digested.get(str(self.node), -1), now)
        self._own_pages.end(applied)
        self._orders.follow(now, self._coordinator)


def _read_clock() -> int:
    return int(time.time() * 1000)
