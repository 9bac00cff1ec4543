"""A node's part in a rollback or a stop of all nodes' ranks: it asks for one and passes orders on, but decides none.

It relies on what its own ranks did: they restore, or leave, only if the ranks of all nodes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from sentinel import wire
from sentinel.actions import RollbackCases
from sentinel.actions.held_snapshots import ACTION, HeldSnapshots
from sentinel.actions.rollback import NO_SNAPSHOT, WAITS, explain_stopped
from sentinel.actions.rollback_state import Outcome, Phase, SavedRollbacks
from sentinel.cluster.protocol.disk import NodeDisk
from sentinel.cluster.protocol.messages import WORDS, NodeRollback, RankReport, RollbackOrder, shorten_case
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt, Rank, RankLink

ASK_SECONDS = 30.0
"""Seconds to wait for an answer of the coordinator after a rollback or a stop was asked for, or after its last answer:
also while the nodes are apart, since they meet seconds after a start, and another coordinator takes over in ten."""
ASKED = "asked of the job's coordinator"
"""What a case says before there is an answer."""
APART = "the nodes of this job do not meet (docs/cluster.md)"
Answer = TypeVar("Answer", wire.Prepared, wire.RolledBack)
HELD, CASES = 64, 16
"""The most snapshots of a rank, and the most cases, in a report: a message has a limit."""


class RelayListener(Protocol):
    """Says what follows a rollback on this node, and learns how it ends and when there is more to report."""

    def pass_on(self) -> None:
        """Have the coordinator learn what is new, once the caller has returned."""

    def will_stop(self, case: Case) -> bool:
        """Return whether the rule of a case has all ranks leave at one step if it is not rolled back."""

    def end_rollback(self, case: Case, outcome: Outcome) -> None:
        """Take note that what this case of the node asked for was not done."""

    def follow_rollback(self, cases: list[Case], outcome: Outcome, done: str) -> None:
        """Take note that all ranks went back, or left. `cases`: those of this node that asked for it. `done`: the
        outcome in words."""


class _Ask:
    """A case for which a rollback or a stop is asked of the coordinator."""

    def __init__(self, case: Case, now: float, apart: str, *, stops: bool) -> None:
        """Ask for this case. `apart`: why the coordinator is not heard now; empty: it is."""
        self.case, self.since, self.stops = case, now, stops
        """`since`: when the coordinator was asked, or its last answer came."""
        self.words: tuple[str, ...] = ()
        """The coordinator's words, or that they are awaited."""
        self.await_words(apart)

    @property
    def refusal(self) -> str:
        """The beginning of the words that say why it was not done."""
        return f"not {'stopped' if self.stops else 'rolled back'}: "

    def await_words(self, apart: str) -> bool:
        """Have the case say that there is no answer yet. Returns whether it said something else before."""
        self.answered = False
        waits = f"waits while {apart}" if apart else ASKED
        return self.put(f"{'stopping' if self.stops else 'rolling back'}: {waits}")

    def put(self, *words: str) -> bool:
        """Have the case say these words. Returns whether it said others before."""
        former = {WAITS, *self.words}
        before, self.words = self.case.done, words
        kept = (text for text in before if text not in former and not text.startswith(("rolling back", "stopping")))
        self.case.done = (*kept, *words)
        return self.case.done != before


class RelayedRollback:
    """The action `rollback` of one attempt, on one node of several. It leads the node's ranks through a stop, too."""

    name = ACTION

    def __init__(self, attempt: Attempt, link: RankLink, cases: RollbackCases, listener: RelayListener) -> None:
        self._attempt, self._link, self._cases, self._listener = attempt, link, cases, listener
        self._snapshots = HeldSnapshots(attempt, cases)
        self.disk = NodeDisk()
        self.apart = APART
        """Why no coordinator is heard now; empty: one is."""
        self.no_orders = ""
        """Why no coordinator may order anything in this job; empty: it may."""
        self._asked: dict[str, _Ask] = {}
        """Id of a case -> what was asked for it."""
        self._order: RollbackOrder | None = None
        """The coordinator's last order. Its message was passed on."""
        self._prepared: dict[int, wire.Prepared] = {}
        """Rank -> its last promise or refusal."""
        self._restored: dict[int, wire.RolledBack] = {}
        """Rank -> its last answer to a commit."""
        self._withdrawn = 0
        """Id of the last Prepare that was withdrawn on this node."""
        self._withholds = False
        self._followed = 0
        """Id of the last rollback or stop that this node took note of."""
        self.agreed_stop_reason = ""
        """Why all ranks left the run; empty: they did not."""
        self._stop_reason = ""
        """Why the ranks would leave, by the last commit."""
        self._done: list[Outcome] = []

    @property
    def phase(self) -> Phase:
        """The phase of the rollback under way."""
        message = self._message
        if isinstance(message, wire.Commit) and not self._has_answers(message.id):
            return "restoring"
        return "preparing" if self._asked or isinstance(message, wire.Prepare) else "idle"

    @property
    def terms(self) -> wire.RollbackTerms | None:
        """The rollback terms that the user armed; None if not every rank of this node did."""
        return self._snapshots.terms

    @property
    def done(self) -> tuple[Outcome, ...]:
        """The rollbacks of this attempt so far, all of them successful."""
        return tuple(self._done)

    def list_good(self, closed: int) -> set[int]:
        """Return the snapshots that a rollback could restore, as far as this node knows, for a fault after step
        `closed`."""
        return self._snapshots.list_good(closed)

    def act_on(self, case: Case, now: float) -> None:
        """Ask for a rollback."""
        if self.terms is None:
            return
        if self.no_orders:
            case.done += (f"not rolled back: {self.no_orders}",)
            return
        self._asked[case.id] = _Ask(case, now, self.apart, stops=False)
        self._listener.pass_on()

    def begin_agreed_stop(self, case: Case, now: float) -> None:
        """Ask that all ranks leave the run for this case. No rollback is under way."""
        if self.agreed_stop_reason:
            case.done += (explain_stopped(self.agreed_stop_reason),)
        elif self.no_orders:
            case.done += (f"not stopped: {self.no_orders}",)
        else:
            self._asked[case.id] = _Ask(case, now, self.apart, stops=True)
            self._listener.pass_on()

    def withhold(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return `names`, the rules of this node for which no snapshot is taken now, with the other nodes that see such
        signs: a snapshot of one node's ranks is of no use to the others', and may displace one that was."""
        if self._withholds != bool(names):
            self._withholds = bool(names)
            self._listener.pass_on()
        nodes = self._order.withholding if self._order is not None and not self.apart else ()
        return (*names, *(f"node {node}" for node in nodes if node != self._node))

    def report(self) -> NodeRollback | None:
        """Return the report for the coordinator; None if there is nothing to say: no rollback armed, no stop asked for,
        and no order."""
        if self.terms is None and not self._asked and self._order is None:
            return None
        attempt, offset = self._attempt, self._attempt.step_offset
        stage = attempt.stages[-1:]
        oldest = min(attempt.held, default=0) + offset
        rolls = {identity: ask.case for identity, ask in self._asked.items() if not ask.stops}
        cases = [
            shorten_case(case)
            for case in (self._cases.list_asking(ACTION) if self.terms is not None else ())
            if case.state == "firing" or (case.state == "resolved" and (case.resolved_step or case.step) >= oldest)
        ]
        return NodeRollback(
            attempt=attempt.number,
            step_offset=offset,
            step_seconds=attempt.step_seconds(),
            stage=stage[0].name if stage else "",
            stage_seq=attempt.stage_seq,
            ranks=tuple(self._report_rank(number, rank) for number, rank in sorted(attempt.ranks.items())),
            cases=tuple(sorted(cases, key=lambda case: (case.state == "firing", case.time))[-CASES:]),
            asks=tuple(rolls),
            followed=tuple(identity for identity, case in rolls.items() if self._listener.will_stop(case)),
            stops=tuple(shorten_case(ask.case) for ask in self._asked.values() if ask.stops),
            withholds=self._withholds,
            on_disk=self.disk.kept[-HELD:],
            safe=self.disk.safe,
        )

    def take_order(self, order: RollbackOrder | None, now: float) -> None:
        """Follow the coordinator's present order; None: the coordinator knows of no rollback."""
        if order is not None and order.attempt != self._attempt.number:
            order = None
        before, called = self._message, self._order is None and order is not None
        self._order = order
        message = self._message
        if isinstance(message, wire.Commit):
            self._stop_reason = message.reason
        if order is not None:
            self.disk.take_order(order)
        if message != before:
            if isinstance(before, wire.Prepare) and not _is_about(message, before.id):
                self._broadcast(wire.Abort(id=before.id, reason="it is not asked for any more"))
                self._withdraw_promises(before.id)
            if message is not None and not (isinstance(message, wire.Prepare) and message.id == self._withdrawn):
                self._broadcast(message)
        for words in order.words if order is not None else ():
            # A case whose rollback was refused may have asked for a stop since the coordinator last heard of it.
            ask = self._asked.get(words.case) if words.node == self._node else None
            if ask is not None and words.stops in (None, ask.stops):
                self._take_words(words.case, words.done, now, over=words.over)
        if called:  # the coordinator wants its ranks' state, though this node asks for nothing
            self._listener.pass_on()

    def add_promise(self, rank: int, answer: wire.Prepared, now: float) -> None:
        """Pass on that a rank promised to restore or leave, or cannot."""
        if answer.id != self._withdrawn:
            self._prepared[rank] = _shorten(answer)
            self._listener.pass_on()

    def add_restore_result(self, rank: int, answer: wire.RolledBack, now: float) -> None:
        """Pass on that a rank restored its snapshot or leaves, or could not."""
        self._restored[rank] = _shorten(answer)
        self._follow()
        self._listener.pass_on()

    def rejoin_rank(self, rank: int, promise: int) -> None:
        """Send a rank that says hello again the verdict that it waits for and may have missed."""
        if promise and isinstance(self._message, wire.Commit) and self._message.id == promise:
            self._link.send(rank, self._message)
        elif promise and not _is_about(self._message, promise):
            self._link.send(rank, wire.Abort(id=promise, reason="the daemon was restarted"))

    def begin_stage(self, now: float) -> None:
        """Report that another stage was announced."""
        self._listener.pass_on()

    def drop_rank(self, rank: int, now: float) -> None:
        """Report that a rank left."""
        self._follow()
        self._listener.pass_on()

    def tick(self, now: float) -> None:
        """End the requests that get no answer. A rank that waits for a verdict goes on by itself."""
        if self.apart and isinstance(self._message, wire.Prepare):
            self.take_order(None, now)
        for identity, ask in list(self._asked.items()):
            if self.no_orders or now - ask.since > ASK_SECONDS:
                reason = self.no_orders or self.apart or f"no word of the job's coordinator in {ASK_SECONDS:.0f} s"
                self._take_words(identity, (ask.refusal + reason,), now, over=True)
            elif (not ask.answered or (self.apart and self.phase != "restoring")) and ask.await_words(self.apart):
                self._cases.record_change(ask.case)

    def save_state(self) -> SavedRollbacks:
        """Return what the next daemon of this node must know."""
        return SavedRollbacks(self.done)

    def resume(self, saved: SavedRollbacks, cases: Mapping[str, Case], now: float) -> None:
        """Go on from what `save_state` gave."""
        self._done = list(saved.done)

    @property
    def _message(self) -> wire.Prepare | wire.Commit | wire.Abort | wire.Stop | None:
        """The last message to the ranks."""
        return self._order.message if self._order is not None else None

    @property
    def _node(self) -> int:
        return min(self._attempt.ranks.items())[1].identity.node if self._attempt.ranks else -1

    def _withdraw_promises(self, identity: int) -> None:
        """Release this node's ranks from this Prepare, whatever they have answered: if a coordinator that did not act
        for a while goes on with it, it is refused, and asked for again under another id."""
        self._withdrawn, seq = identity, self._attempt.last_seq
        self._prepared = {
            rank.identity.rank: wire.Prepared(id=identity, ok=False, seq=seq) for rank in self._attempt.live
        }

    def _report_rank(self, number: int, rank: Rank) -> RankReport:
        prepared, restored = self._prepared.get(number), self._restored.get(number)
        is_asked = prepared is not None and (prepared.id == self._withdrawn or _is_about(self._message, prepared.id))
        return RankReport(
            rank=number,
            state=rank.state,
            over=rank.ending is not None,
            last_seq=rank.last_seq,
            version=rank.hello.version,
            takes_stop=rank.hello.takes_stop,
            held=tuple(sorted(rank.snapshots)[-HELD:]),
            terms=rank.hello.rollback,
            prepared=prepared if is_asked else None,
            restored=restored if restored is not None and _is_about(self._message, restored.id) else None,
        )

    def _take_words(self, identity: str, words: tuple[str, ...], now: float, *, over: bool) -> None:
        """Show on a case of this node what the coordinator does about it. `over`: it does nothing more."""
        ask = self._asked[identity]
        ask.answered, ask.since = True, now
        changed = ask.put(*words)
        if over:
            del self._asked[identity]
            reason = words[-1].removeprefix(ask.refusal) if words else "the coordinator did nothing"
            self._listener.end_rollback(ask.case, Outcome(False, ask.case.alert, reason=reason, stops=ask.stops))
        elif changed:
            self._cases.record_change(ask.case)

    def _follow(self) -> None:
        """Conclude that the ranks of all nodes went back, or leave, if all ranks of this node do."""
        answers = [self._restored.get(rank.identity.rank) for rank in self._attempt.live]
        first = answers[0] if answers else None
        if first is None or first.id == self._followed or not self._has_answers(first.id):
            return
        given = [answer for answer in answers if answer is not None]
        if not all(answer.ok for answer in given):
            return
        self._followed, order, offset = first.id, self._order, self._attempt.step_offset
        stops = first.to == NO_SNAPSHOT
        missing = next((f" ({answer.reason})" for answer in given if answer.reason), "")
        if stops:
            self.agreed_stop_reason = self._stop_reason or "an order of the job's coordinator"
            done = f"stopped: all ranks ended training at the exit of step {first.at + offset}"
        else:
            done = f"rolled back to step {first.to + offset} at the exit of step {first.at + offset}"
        outcome = Outcome(
            True, order.alert if order is not None else "", first.to, first.at,
            max(answer.seconds for answer in given), missing, order.sign if order is not None else -1, stops,
        )  # fmt: skip
        if not stops:
            self._done.append(outcome)
        asked, self._asked = self._asked, {}
        for ask in asked.values():
            ask.put(done + missing)
        self._listener.follow_rollback([ask.case for ask in asked.values()], outcome, done + missing)

    def _has_answers(self, identity: int) -> bool:
        """Whether all ranks of this node answered the commit of this rollback."""
        live = [self._restored.get(rank.identity.rank) for rank in self._attempt.live]
        return all(answer is not None and answer.id == identity for answer in live)

    def _broadcast(self, message: wire.Message) -> None:
        for rank in self._attempt.live:
            self._link.send(rank.identity.rank, message)


def _is_about(message: wire.Message | None, identity: int) -> bool:
    return isinstance(message, wire.Prepare | wire.Commit | wire.Abort) and message.id == identity


def _shorten(answer: Answer) -> Answer:
    """Return an answer with its reason cut to `WORDS`: the text of a rank's exception may not fit into a message."""
    return msgspec.structs.replace(answer, reason=answer.reason[:WORDS])
