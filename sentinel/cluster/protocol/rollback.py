"""The coordinator's rollback, or stop: of the ranks of all nodes, or of none.

    a node reports   its ranks, their snapshots, its cases that ask for either          with each pulse, and at once
    an order         Prepare, Commit, Abort or Stop, for all ranks of all nodes         with each beat, and at once
    a node reports   its ranks' promises, and the result of the restore

The decisions are made by the same actions as for one node (`RollbackAction`, `StopAction`), over the ranks that the
nodes report. They matter only until the ranks' own vote, which needs no daemon: if a coordinator dies, what it was
about to order is lost, and no rank restores or leaves alone.

A node on which no rollback is armed reports once there is an order, even one without a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from sentinel import wire
from sentinel.actions.held_snapshots import ACTION
from sentinel.actions.rollback import RollbackAction
from sentinel.actions.rollback_state import Outcome, SavedRollbacks
from sentinel.actions.stop import StopAction
from sentinel.cluster.protocol.disk import find_floor, list_on_all
from sentinel.cluster.protocol.messages import (
    WORDS,
    CaseWords,
    NodeRollback,
    NodeState,
    RankReport,
    RollbackOrder,
)
from sentinel.diagnose.case import Case
from sentinel.runs import Ending, NoRanks, Rank, Stage
from sentinel.runs.rank_set import RankSet
from sentinel.text import join_names

ARRIVAL_SECONDS = 10.0
"""Seconds that a requested rollback waits for missing nodes."""
NAMED = 4
SAID = 8
"""How many of the last sentences about a case are sent."""
Asked = tuple[int, str]
"""Node and id of a case."""


class JobRanks(RankSet):
    """The ranks of all nodes, as last reported."""

    def __init__(self, identity: wire.Identity, nodes: int) -> None:
        """Start without reports. `identity`: that of any rank. `nodes`: how many the job has."""
        super().__init__()
        self._identity, self.nodes = identity, nodes
        self.reports: dict[int, NodeRollback] = {}
        """Node -> its last report."""
        self._silent: dict[int, str] = {}
        """Node -> why it is not counted on; empty: it is."""

    def take(self, node: int, report: NodeRollback | None, trouble: str, now: float) -> list[int]:
        """Take a node's report; `trouble`: why the node is not counted on; empty: it is. Returns the ranks that left
        since the last one."""
        self._silent[node] = trouble or ("" if report is not None else "has not said where its ranks stand")
        if report is None or trouble:
            for number in self._numbers(node):
                self.ranks[number].state = "lost"
            return []
        before = {number for number in self._numbers(node) if self.ranks[number].state == "live"}
        self.reports[node] = report
        self.ranks.update((one.rank, self._rank(node, one, report, now)) for one in report.ranks)
        return [number for number in sorted(before) if self.ranks[number].state != "live"]

    @property
    def absence(self) -> str:
        """Which nodes are missing; empty: all ranks are here."""
        missing = [f"node {node} {why}" for node, why in sorted(self._silent.items()) if why]
        if unheard := self.nodes - len(self._silent):
            missing.append(f"{unheard} node{'s' if unheard > 1 else ''} never heard")
        return join_names(missing, NAMED) or super().absence

    @property
    def unarmed(self) -> str:
        """On which nodes rollback is not armed; empty: on none."""
        nodes = sorted({rank.identity.node for rank in self.live if rank.hello.rollback is None})
        has = "have" if len(nodes) > 1 else "has"
        named = join_names([f"node {node}" for node in nodes], NAMED)
        return f"{named} {has} not armed rollback on all ranks" if nodes else ""

    @property
    def stages(self) -> Sequence[Stage]:
        """The present stage; empty: no stage was announced."""
        latest = max(self.reports.values(), key=lambda report: report.stage_seq, default=None)
        return [Stage(latest.stage_seq, latest.stage)] if latest is not None and latest.stage_seq else []

    @property
    def stage_seq(self) -> int:
        """The first step of the present stage."""
        return max((report.stage_seq for report in self.reports.values()), default=0)

    @property
    def withholding(self) -> tuple[int, ...]:
        """The nodes that see signs for which no snapshot may be taken. What a node saw before it fell silent does not
        count: it may be silent for hours."""
        seen = (node for node, report in sorted(self.reports.items()) if report.withholds)
        return tuple(node for node in seen if not self._silent[node])

    def step_seconds(self) -> float:
        """Return the seconds of a step on the slowest node."""
        return max((report.step_seconds for report in self.reports.values()), default=0.1)

    def _numbers(self, node: int) -> list[int]:
        return [number for number, rank in self.ranks.items() if rank.identity.node == node]

    def _rank(self, node: int, one: RankReport, report: NodeRollback, now: float) -> Rank:
        identity = msgspec.structs.replace(self._identity, rank=one.rank, node=node)
        hello = wire.Hello(
            version=one.version, identity=identity, step_offset=report.step_offset, rollback=one.terms,
            snapshots=one.held, takes_stop=one.takes_stop,
        )  # fmt: skip
        rank = Rank(hello, now)
        rank.state, rank.last_seq = one.state, one.last_seq
        rank.ending = Ending(now, None, oom=False) if one.over else None
        return rank


class _Orders(NoRanks):
    """Keeps the last message to the ranks, which is the same for all of them."""

    last: wire.Prepare | wire.Commit | wire.Abort | wire.Stop | None = None

    def send(self, rank: int, message: wire.Message) -> None:
        """Keep a message for all ranks of all nodes."""
        assert isinstance(message, wire.Prepare | wire.Commit | wire.Abort | wire.Stop)
        self.last = message


class JobCase:
    """One alert that fires and asks for a rollback, or for a stop, on one node or several."""

    def __init__(self, case: Case, now: float) -> None:
        self.case, self.since = case, now
        self.asking: set[Asked] = set()
        self.fired = False
        """Whether what it asks for was begun or refused."""
        self.is_followed_by_stop = False
        """Whether all ranks must leave if they are not rolled back."""


class JobRollbacks:
    """The rollbacks and stops of one attempt of a job."""

    def __init__(
        self, attempt: int, identity: wire.Identity, nodes: int, done: Sequence[Outcome] = (), stopped: str = ""
    ) -> None:
        """Go on from an earlier coordinator. `done`: the rollbacks of this attempt so far. `stopped`: why all ranks
        left; empty: they did not."""
        self.attempt = attempt
        self.ranks = JobRanks(identity, nodes)
        self._orders = _Orders()
        self._action = RollbackAction(self.ranks, self._orders, self, self)
        self._action.resume(SavedRollbacks(tuple(done)), {}, 0.0)
        self._action.agreed_stop_reason = stopped
        self._stop = StopAction(self._action, self)
        self._firing: list[JobCase] = []
        """Alerts that ask for a rollback."""
        self._stopping: list[JobCase] = []
        """Alerts that ask for a stop."""
        self._others: dict[int, list[Case]] = {}
        """Node -> its cases that are over, or for which nothing more is done."""
        self._settled: set[Asked] = set()
        """Cases for which a rollback was done; their nodes may not know yet."""
        self._alert, self._sign = "", -1
        """The alert of the last rollback, and the first step that showed it."""
        self._stage_seq = 0
        self._taken: dict[int, tuple[NodeRollback | None, str]] = {}
        """Node -> the last report that was taken from it, and why it was not counted on."""

    @property
    def armed(self) -> bool:
        """Whether all ranks of all nodes are here, and all of them armed a rollback."""
        return not self.ranks.absence and self._action.terms is not None

    def take_node(self, state: NodeState, report: NodeRollback | None, now: float) -> None:
        """Take a node's state, and its last report."""
        silence = f"({state.hostname}) has been silent for {state.silent_seconds:.0f} s"
        trouble = {"alive": "", "left": f"({state.hostname}) has left", "silent": silence}[state.state]
        self.take_report(state.node, report, trouble, now)

    def take_report(self, node: int, report: NodeRollback | None, trouble: str, now: float) -> None:
        """Take a node's last report; `trouble`: why the node is not counted on; empty: it is."""
        before, self._taken[node] = self._taken.get(node), (report, trouble)
        if before is not None and before[0] is report and before[1] == trouble:
            return
        if report is not None and report.attempt != self.attempt:
            trouble = trouble or f"is at attempt {report.attempt}, not {self.attempt}"
        left = self.ranks.take(node, report, trouble, now)
        if report is None or trouble:
            return
        for one in report.ranks:
            if one.prepared is not None:
                self._action.add_promise(one.rank, one.prepared, now)
            if one.restored is not None:
                self._action.add_restore_result(one.rank, one.restored, now)
        for rank in left:
            self._action.drop_rank(rank, now)
        self._take_cases(node, report, now)

    def advance(self, now: float) -> None:
        """Begin what was asked for, and end what takes too long."""
        if self.ranks.stage_seq > self._stage_seq:
            self._stage_seq = self.ranks.stage_seq
            self._action.begin_stage(now)
        for asked in self._list_due(self._firing, now):
            if unarmed := "" if self.ranks.absence else self.ranks.unarmed:
                asked.case.done += (f"not rolled back: {unarmed}",)
            else:
                self._action.act_on(asked.case, now)
        for asked in self._list_due(self._stopping, now):
            self._stop.act_on(asked.case, now)
        self._action.tick(now)
        self._stop.tick(now)

    def make_order(self) -> RollbackOrder | None:
        """Return the order for all nodes: the last message, and what is done about their cases. None: no node has asked
        for anything, or armed a rollback."""
        if not self.ranks.ranks:
            return None
        words = tuple(
            CaseWords(
                node=node, case=case, done=_shorten(asked.case.done), over=not self._handles(asked.case), stops=stops
            )
            for stops, known in ((False, self._firing), (True, self._stopping))
            for asked in known
            for node, case in sorted(asked.asking)
            if asked.fired
        )
        if (case := self._action.case) is not None:
            self._alert, self._sign = case.alert, case.first_seq
        return RollbackOrder(
            attempt=self.attempt, message=self._find_message(), alert=self._alert, sign=self._sign, words=words,
            withholding=self.ranks.withholding,
            on_all=list_on_all(self.ranks.reports, self.ranks.nodes, self.attempt),
            floor=find_floor(self.ranks.reports, self.ranks.nodes, self.attempt),
        )  # fmt: skip

    def _find_message(self) -> wire.Prepare | wire.Commit | wire.Abort | wire.Stop | None:
        """Return the present message to the ranks. A commit is sent only until its result is known: a daemon that
        starts later would wait for answers that its ranks gave to the one before."""
        last = self._orders.last
        return None if isinstance(last, wire.Commit) and self._action.phase == "idle" else last

    def _list_due(self, firing: Sequence[JobCase], now: float) -> list[JobCase]:
        """Return the cases whose turn has come. While a node is missing, they wait for it for a while."""
        patience = ARRIVAL_SECONDS if self.ranks.absence else 0.0
        due = [asked for asked in firing if not asked.fired and now - asked.since >= patience]
        for asked in due:
            asked.fired = True
        return due

    def _handles(self, case: Case) -> bool:
        return self._action.handles(case) or self._stop.awaits_turn(case)

    def _take_cases(self, node: int, report: NodeRollback, now: float) -> None:
        firing = {case.id: case for case in report.cases if case.state == "firing"}
        stopping = {case.id: case for case in report.stops}
        known = firing.keys() | stopping.keys()
        self._settled -= {key for key in self._settled if key[0] == node and key[1] not in known}
        unasked = (case for case in report.cases if case.id not in report.asks)
        self._others[node] = [case for case in unasked if (node, case.id) not in self._settled]
        self._take_asks(self._firing, node, report.asks, firing, now)
        self._take_asks(self._stopping, node, tuple(stopping), stopping, now)
        for asked in self._firing:
            asked.is_followed_by_stop |= any((node, identity) in asked.asking for identity in report.followed)

    def _take_asks(
        self, known: list[JobCase], node: int, asks: Sequence[str], firing: Mapping[str, Case], now: float
    ) -> None:
        """Take what a node asks for now, of one kind: a rollback or a stop. `known`: the cases of that kind so far."""
        for asked in known:
            asked.asking -= {key for key in asked.asking if key[0] == node and key[1] not in asks}
        for identity in asks:
            case, key = firing.get(identity), (node, identity)
            if case is None or key in self._settled:
                continue
            asked = next((one for one in known if key in one.asking), None) or self._join(known, case, now)
            asked.asking.add(key)
            asked.case.first_seq = min(asked.case.first_seq, case.first_seq)
        for asked in [one for one in known if not one.asking]:
            asked.case.state = "resolved"  # its turn will not come any more
            known.remove(asked)

    def _join(self, known: list[JobCase], case: Case, now: float) -> JobCase:
        """Return the known case of the same alert on another node, or a new one: what was done for a case that is over
        does not hold for one that fires after it, though the nodes of the former may not know yet."""
        alike = (one for one in known if one.case.alert == case.alert)
        found = next((one for one in alike if not one.fired or self._handles(one.case)), None)
        if found is None:
            found = JobCase(case, now)
            known.append(found)
        return found

    # What the action needs of the incidents, and what learns how it ends.

    def list_asking(self, action: str) -> Iterator[Case]:
        """Yield the cases of all nodes whose rule names a rollback. An alert that fires on several is one case."""
        assert action == ACTION
        yield from (asked.case for asked in self._firing)
        for cases in self._others.values():
            yield from cases

    def record_change(self, case: Case) -> None:
        """Do nothing: what is done about a case goes to its nodes with each order."""

    def preserve(self) -> None:
        """Do nothing: the next coordinator asks the nodes, and what is not decided by then is aborted."""

    def will_stop(self, case: Case) -> bool:
        """Return whether all ranks must leave for this case if they are not rolled back."""
        return any(asked.case is case and asked.is_followed_by_stop for asked in self._firing)

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        """Settle all firing cases if all ranks went back. If the ranks left, or did neither, only the cases say so."""
        if outcome.ok and not outcome.stops:
            for asked in (*self._firing, *self._stopping):
                self._settled |= asked.asking
                asked.case.state = "rolled_back"
            self._firing.clear()
            self._stopping.clear()


def _shorten(done: Sequence[str]) -> tuple[str, ...]:
    """Return what was done about a case, as far as it fits into a beat: one text too long makes a beat unreadable."""
    return tuple(text[:WORDS] for text in done[-SAID:])
