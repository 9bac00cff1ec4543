"""One run under watch: its steps go through the rules, its incidents to diagnosis, history, people and actions.

Batch -> Attempt -> closed Step -> Evaluator -> Transition -> Case -> store, receivers, actions
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sentinel import wire
from sentinel.actions.rollback import Outcome, RollbackAction
from sentinel.diagnose import case as cases
from sentinel.diagnose.case import Case
from sentinel.engine import Entity, Evaluator, Incident, Observation, Rule, Transition
from sentinel.notify import Event, Receiver
from sentinel.notify.terminal import Terminal
from sentinel.runs import Attempt, Rank, Run, Step
from sentinel.store import Store

log = logging.getLogger(__name__)

ATTEND_STEPS = 50
"""Steps for which every step is sampled in full once something looks odd, and no snapshot is taken."""
ATTEND_SECONDS = 1.0
"""At least: in a loop of 1 ms steps, 50 of them are over before the next batch is here."""

_RUN = Entity("run", "")


class Watch:
    """Everything that happens to one run."""

    def __init__(self, run: Run, rules: Sequence[Rule], store: Store | None, send: Callable[[int, wire.Message], None]):
        self.run, self.store = run, store
        self.cases: dict[str, Case] = {}
        self._rules, self._send = rules, send
        self._receivers: list[Receiver] = [Terminal(lambda notice: send(self._first_rank(), notice))]
        self._attending_until = -1
        self._rewound_at = -1
        self._trouble_told = False
        self._begin_attempt()

    @property
    def attempt(self) -> Attempt:
        """The present attempt."""
        return self._attempt

    def hello(self, hello: wire.Hello, now: float) -> Rank:
        """A rank arrives. Raises ProtocolError where it belongs to an attempt that is over."""
        rank, began = self.run.hello(hello, now)
        if began:
            self._begin_attempt()
            if self.store:
                self.store.attempt(self._attempt.number, msgspec.msgpack.encode(hello))
        self._event(hello.next_seq, "hello", rank=hello.identity.rank, pid=hello.identity.pid)
        return rank

    def message(self, rank: Rank, message: wire.FromRank, now: float) -> None:
        """Whatever a rank says after its hello."""
        number = rank.identity.rank
        match message:
            case wire.Batch():
                self._attempt.take(rank, message, now)
                self.advance(now)
            case wire.LayerTable():
                self._attempt.tables[message.digest] = message
            case wire.SnapshotTaken():
                rank.snapshots = (rank.snapshots | {message.seq}) - set(message.void)
                self._event(message.seq, "snapshot", rank=number, bytes=message.nbytes, seconds=message.seconds)
            case wire.Prepared():
                self.rollback.prepared(number, message, now)
            case wire.RolledBack():
                rank.snapshots -= set(message.void)
                self.rollback.rolled_back(number, message, now)
            case wire.PhaseChanged():
                rank.phase = message.name
                self._event(message.seq, "phase", rank=number, name=message.name)
            case wire.Goodbye():
                rank.goodbye = message
            case _:
                log.warning("rank %d: unexpected %s", number, type(message).__name__)

    def lost(self, rank: Rank, now: float) -> None:
        """A rank's connection ended."""
        goodbye = rank.goodbye
        self._attempt.lose(rank.identity.rank, goodbye)
        self.rollback.lost(rank.identity.rank)
        self._event(
            rank.last_seq,
            "goodbye" if goodbye else "lost",
            rank=rank.identity.rank,
            reason=goodbye.reason if goodbye else "connection lost",
        )
        self.advance(now)
        if not self._attempt.live and self.store:
            self.store.ended(self._attempt.number)

    def advance(self, now: float) -> None:
        """Judge the steps that closed."""
        for step in self._attempt.closed(now):
            if self.store:
                self.store.step(self._attempt.number, step)
            if step.seq > self._rewound_at:
                self._transitions(self.evaluator.observe(_observation(step)), now)
                self._attend(step.seq)

    def tick(self, now: float) -> None:
        """Several times a second: steps that wait for a silent rank, time-outs, trouble with the disk."""
        self.advance(now)
        self.rollback.tick(now)
        if self.store and self.store.trouble and not self._trouble_told:
            self._trouble_told = True
            self.tell(self.store.trouble)

    def tell(self, text: str) -> None:
        """One line on the training terminal."""
        self._send(self._first_rank(), wire.Notice(text=f"[sentinel] {text}"))

    def _begin_attempt(self) -> None:
        self._attempt = self.run.attempt
        self.evaluator = Evaluator(self._rules, run=self.run.name, step_offset=self._attempt.step_offset)
        self.rollback = RollbackAction(self._attempt, self._send, self._rollback_ended)
        self._attending_until = self._rewound_at = -1

    def _first_rank(self) -> int:
        return min((rank.identity.rank for rank in self._attempt.live), default=0)

    def _attend(self, seq: int) -> None:
        """Ask for every statistic at every step while something looks odd."""
        if not self.evaluator.suspicious:
            return
        steps = max(ATTEND_STEPS, math.ceil(ATTEND_SECONDS / max(self._attempt.step_seconds(), 1e-4)))
        if seq >= self._attending_until - steps // 2:
            self._attending_until = seq + steps
            for rank in self._attempt.live:
                self._send(rank.identity.rank, wire.Attend(steps=steps))

    def _transitions(self, transitions: Sequence[Transition], now: float) -> None:
        for transition in transitions:
            incident = transition.incident
            if transition.kind == "fired":
                self._fired(incident, now)
            elif (known := self.cases.get(self._identity(incident))) is not None:
                cases.updated(known, incident, self._attempt)
                if transition.kind in ("resolved", "rolled back"):
                    self._notify("resolved" if transition.kind == "resolved" else "rolled back", known)
                self._save(known)

    def _fired(self, incident: Incident, now: float) -> None:
        case = cases.opened(self.run, self._attempt, incident)
        case.id = self._identity(incident)
        self.cases[case.id] = case
        if self.rollback.name in incident.actions:
            self.rollback.fired(case, now)
        log.warning("%s %s at step %d: %s", case.severity, case.alert, case.step, case.summary)
        self._save(case)
        self._notify("fired", case)

    def _rollback_ended(self, case: Case, outcome: Outcome) -> None:
        self._event(outcome.at, "rollback", **msgspec.to_builtins(outcome))
        if outcome.ok:
            self._rewound_at = outcome.at
            for other in self.cases.values():
                if other.state == "firing" and other is not case:
                    other.done = (case.done[-1],)
            self._attempt.rewind(outcome.to, outcome.at)
            self._transitions(self.evaluator.rewound(outcome.to, outcome.at), 0.0)
        else:
            self.tell(f"{case.alert}: {case.done[-1]}")
        self._save(case)

    def _identity(self, incident: Incident) -> str:
        """Short, and unique in the run's history, over attempts too."""
        return f"{self._attempt.number}.{incident.id}"

    def _notify(self, event: Event, case: Case) -> None:
        for receiver in self._receivers:
            receiver.notify(event, case)

    def _save(self, case: Case) -> None:
        if self.store:
            self.store.incident(case.id, case.step, case.builtins())

    def _event(self, seq: int, kind: str, **detail: Any) -> None:
        if self.store:
            self.store.event(self._attempt.number, seq, kind, **detail)


def _observation(step: Step) -> Observation:
    values: dict[Entity, Mapping[str, float]] = {_RUN: step.run}
    for rank, sample in step.ranks.items():
        values[Entity("rank", str(rank))] = sample
    if step.layers is not None:
        for name, stats in step.layers.items():
            values[Entity("layer", name)] = stats
    return Observation(seq=step.seq, time=step.time, values=values)
