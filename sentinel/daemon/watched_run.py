"""One run under watch: its steps go through the rules, its incidents to diagnosis, history, people and actions.

Batch -> Attempt -> closed Step -> Evaluator -> Transition -> Case -> store, receivers, actions
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from sentinel import wire
from sentinel.actions import Action, Context, Factory, Shielded
from sentinel.actions.evidence import EvidenceAction, out_of_memory
from sentinel.actions.restart import RestartAction, may_end
from sentinel.actions.rollback import RollbackAction
from sentinel.actions.rollback_state import Outcome
from sentinel.collect import Fault
from sentinel.daemon import restoration
from sentinel.daemon.casebook import Casebook
from sentinel.daemon.clock import Clock
from sentinel.daemon.publishing import Publishing
from sentinel.daemon.spacing import Spacings
from sentinel.daemon.stalls import StallDetector
from sentinel.devices import Devices, Gpu
from sentinel.diagnose.case import Case
from sentinel.engine import Evaluator, Observation, Rule, Transition
from sentinel.notify import Event
from sentinel.notify.notifier import Notifier
from sentinel.runs import ARRIVAL_SECONDS, Attempt, Rank, Run, Stage
from sentinel.store import Store

log = logging.getLogger(__name__)

ATTEND_STEPS = 50
"""Steps for which every step is sampled in full once something looks odd, and no snapshot is taken."""
ATTEND_SECONDS = 1.0
"""For this long at least: in a loop of 1 ms steps, 50 of them are over before the next batch is here."""

PRESERVE_SECONDS = 30.0
"""Between two writes of the rules' state. A daemon that takes over judges the steps since once more."""
DEVICES_SECONDS = 15.0
"""Between two readings of a GPU or the host that the history keeps: Prometheus' usual spacing."""


class WatchedRun:
    """Everything that happens to one run."""

    def __init__(
        self,
        run: Run,
        rules: Sequence[Rule],
        store: Store | None,
        send: Callable[[int, wire.Message], None],
        notifier: Callable[[Callable[[wire.Notice], None], Callable[[Case], None]], Notifier],
        actions: Mapping[str, Factory] = MappingProxyType({}),
        interrupt: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:
        """`notifier` is made with what prints on the training terminal, and what records a case. `actions`: those of
        other packages. `interrupt(process, signal)` signals a rank's process, and answers whether it could."""
        self._factories = actions
        self.run, self.store = run, store
        self.book = Casebook(run, store, lambda keep: notifier(self._print, keep))
        self.notifier = self.book.notifier
        self._rules, self._send, self._interrupt = rules, send, interrupt
        self.attending_until = self.rewound_at = -1
        self.stages_begun = 0
        """Of those that were announced: the rules' state knows of them."""
        self.interrupted: list[Case] = []
        """Cases whose rollback the daemon before this one had begun, or was about to begin."""
        self.left = 0.0
        """When a rank left last, by the daemon's clock."""
        self.evaluations = 0
        """Times that a rule was applied to a step."""
        self.faulty = False
        """Whether the last tick failed."""
        self.end_job: Callable[[Case], bool] = lambda case: False
        """Has the supervisor end the job; whether there is one that will."""
        self.why_no_history = ""
        """Why there is no history, where there is none."""
        self._trouble_told = False
        self._preserve_at = 0.0
        self._keep_device_at: dict[str, float] = {}
        self.stalls = self._new_stall_detector()
        self.begin_attempt()

    @property
    def attempt(self) -> Attempt:
        """The present attempt."""
        return self._attempt

    @property
    def cases(self) -> Mapping[str, Case]:
        """Of all attempts, by id."""
        return self.book.cases

    def hello(self, hello: wire.Hello, now: float, process: int = 0) -> Rank:
        """A rank arrives. Raises ProtocolError where it belongs to an attempt that is over."""
        rank, began = self.run.hello(hello, now)
        rank.process = process
        number, body = hello.identity.rank, msgspec.msgpack.encode(hello)
        if began:
            self.begin_attempt()
            self.book.close_former()
            if self.store:
                self.store.attempt(self._attempt.number, body)
        if self.store:
            self.store.rank(self._attempt.number, number, process=process, hello=body)
        self._event(hello.next_seq, "hello", rank=number, pid=hello.identity.pid)
        if hello.rollback is not None:
            self.transitions(self.evaluator.be_rewindable(), now)
        return rank

    def tell_again(self, rank: Rank) -> None:
        """A rank said hello, and is connected now: it may have missed a verdict, and the first one notices."""
        self.rollback.returned(rank.identity.rank, rank.hello.promise)
        if rank.identity.rank == min(number for number, known in self._attempt.ranks.items() if known.state != "gone"):
            self.book.tell_again()

    def message(self, rank: Rank, message: wire.FromRank, now: float) -> None:
        """Whatever a rank says after its hello."""
        number = rank.identity.rank
        match message:
            case wire.Batch():
                self._attempt.take(rank, message, now)
                self.advance(now)
            case wire.LayerTable():
                self._attempt.tables[message.digest] = message
                if self.store:
                    self.store.table(self._attempt.number, message.digest, msgspec.msgpack.encode(message))
            case wire.StageBegan():
                self._announced(Stage(message.seq, "".join(c if c.isprintable() else " " for c in message.name)), now)
            case wire.SnapshotTaken():
                rank.snapshots = (rank.snapshots | {message.seq}) - set(message.void)
                self._tell_held(message.seq)
                self._event(message.seq, "snapshot", rank=number, bytes=message.nbytes, seconds=message.seconds)
            case wire.Prepared():
                self.rollback.prepared(number, message, now)
            case wire.RolledBack():
                rank.snapshots -= set(message.void)
                self.rollback.rolled_back(number, message, now)
            case wire.Published():
                if (written := self.publishing.published(number, message)) is not None:
                    seq, seconds, nbytes = written
                    self._event(seq, "snapshot on disk", bytes=nbytes, seconds=seconds)
            case wire.PhaseChanged():
                rank.phase = message.name
                self._event(message.seq, "phase", rank=number, name=message.name)
            case wire.Collected():
                self.evidence.collected(number, message)
                if message.what == "out_of_memory":
                    self._observe_between(out_of_memory(rank, self._attempt.closed_to), now)
            case wire.Reply():
                self.stalls.stacks.replied(number, message)
                self.stalls.collectives.replied(number, message)
            case wire.Goodbye():
                rank.goodbye, rank.heard = message, now
                self.transitions(self.evaluator.settled(), now)  # while it is there to be told
            case _:
                log.warning("rank %d: unexpected %s", number, type(message).__name__)

    def _tell_held(self, seq: int) -> None:
        """Ranks judge by their own losses whether to take a snapshot, and so may hold different ones."""
        if len(self._attempt.live) > 1 and self._attempt.complete and seq in self._attempt.held:
            for rank in self._attempt.live:
                self._send(rank.identity.rank, wire.Held(seq=seq))

    def measured(
        self, devices: Devices, observation: Observation, faults: Sequence[tuple[Gpu, Fault]], now: float
    ) -> None:
        """GPUs and host were read. `faults`: those of this run's GPUs since the last time."""
        self._attempt.devices = devices
        for gpu, fault in faults:
            detail = {"gpu": gpu.index, "uuid": gpu.uuid, "fault": fault.kind, "code": fault.code, "text": fault.text}
            self._event(self._attempt.closed_to, "gpu fault", **detail)
        self._observe_between(observation, now)
        if self.store:
            for (scope, name), values in observation.values.items():
                if now >= self._keep_device_at.get(device := f"{scope} {name}", 0.0):
                    self._keep_device_at[device] = now + DEVICES_SECONDS
                    self.store.reading(self._attempt.number, device, observation.seq, observation.time, values)

    def lost(self, rank: Rank, now: float) -> None:
        """A rank's connection ended."""
        goodbye = rank.goodbye
        self._attempt.lose(rank.identity.rank, goodbye)
        self._observe_between(self.stalls.left(rank), now)
        self.rollback.lost(rank.identity.rank, now)
        if self.store and goodbye:
            self.store.gone(self._attempt.number, rank.identity.rank)
        self._event(
            rank.last_seq,
            "goodbye" if goodbye else "lost",
            rank=rank.identity.rank,
            reason=goodbye.reason if goodbye else "connection lost",
        )
        self.advance(now)
        if not self._attempt.live:
            self.transitions(self.evaluator.settled(), now)
            if self.store:
                self.store.ended(self._attempt.number)

    def processes_ended(self, now: float) -> None:
        """A process ended."""
        self._observe_between(self.stalls.died(now), now)

    def advance(self, now: float) -> None:
        """Judge the steps that closed."""
        judged = False
        self.clock.look()
        for step in self._attempt.closed(now):
            if self.store:
                self.store.step(self._attempt.number, step)
            if step.seq > self.rewound_at:
                if self.stages_begun < len(self._attempt.stages):
                    self.transitions(self.begin_stages(step.seq), now)
                transitions = self.evaluator.observe(self.clock.of_step(step))
                self.judged_to = step.seq
                self.evaluations += len(self._rules)
                if transitions:
                    self.transitions(transitions, now)
                judged = True
        if judged:
            self._attend(self.judged_to)
        self.publishing.advance(self.rollback.terms, self.judged_to, self._healthy)

    def _announced(self, stage: Stage, now: float) -> None:
        if not self._attempt.announced(stage):
            return
        self._event(stage.seq, "stage", name=stage.name)
        self.transitions(self.begin_stages(self.judged_to), now)
        self.rollback.staged(now)
        self.preserve()

    def begin_stages(self, seq: int) -> list[Transition]:
        """Begin the stages that were announced for this step or an earlier one."""
        transitions: list[Transition] = []
        while self.stages_begun < len(self._attempt.stages) and self._attempt.stages[self.stages_begun].seq <= seq:
            name = self._attempt.stages[self.stages_begun].name
            self.stages_begun += 1
            for transition in (found := self.evaluator.begin_stage()):
                if transition.kind == "resolved" and (case := self.book.of(transition.incident)) is not None:
                    case.done += (f"over: stage {name!r} began",)
            transitions += found
        return transitions

    def _healthy(self) -> bool:
        """Whether nothing is open that asks for a rollback."""
        asked = any(i.state == "firing" and self.rollback.name in i.actions for i in self.evaluator.incidents)
        return not asked and self.rollback.phase == "idle"

    def tick(self, now: float) -> None:
        """Once a second, and more often while `restless`: steps that wait for a silent rank, time-outs, trouble with
        the disk."""
        self.advance(now)
        self.transitions(self.evaluator.gone_on(), now)
        self._observe_between(self.stalls.tick(now), now)
        self.processes_ended(now)
        for action in self._actions.values():
            action.tick(now)
        self.spacings.tick(now)
        self.notifier.tick(self.cases.values())
        if now >= self._preserve_at:
            self._preserve_at = now + PRESERVE_SECONDS
            self._save_state()
        if self.interrupted and (self._attempt.complete or now - self._attempt.began > ARRIVAL_SECONDS):
            self._take_up(now)
        if self.store and self.store.trouble and not self._trouble_told:
            self._trouble_told = True
            self.tell(self.store.trouble)
        while self.store and self.store.notes:
            self.tell(self.store.notes.pop(0))
            self.notifier.pipeline.write_anew()

    def supervised(self, now: float) -> None:
        """A supervisor has come: what is open and asks for a restart may have been waiting for one."""
        asking = {rule.name for rule in self._rules if self.restart.name in rule.actions}
        for case in self.book.present():
            if case.state == "firing" and case.alert in asking:
                self.restart.fired(case, now)

    @property
    def restless(self) -> bool:
        """Whether something is open that wants a look several times a second."""
        busy = self.rollback.phase != "idle" or self.stalls.restless or self.restart.waiting
        return busy or bool(self.interrupted) or self.evaluator.suspicious

    def reload(self, rules: Sequence[Rule], now: float) -> None:
        """Apply these rules from now on. What an unchanged rule has seen, it keeps."""
        self._rules = rules
        ended = self.evaluator.replaced(rules)
        for transition in ended:
            if (case := self.book.of(transition.incident)) is not None:
                case.done += ("over: its rule was changed or taken away",)
        self.transitions(ended, now)
        self.preserve()  # a state of the former rules fits nobody

    def tell(self, text: str) -> None:
        """One line on the training terminal."""
        self._print(wire.Notice(text=f"[sentinel] {text}"))

    def begin_attempt(self) -> None:
        self._attempt = self.run.attempt
        self.stalls.close()
        self.stalls = self._new_stall_detector()
        self.evaluator = self.new_evaluator()
        self.clock = Clock(self._attempt)
        self.spacings = Spacings(self._attempt, self._send)
        written = self.book.written
        self.rollback = RollbackAction(self._attempt, self._send, self._rollback_ended, self.preserve, written)
        self.publishing = Publishing(self.run, self._send, self.tell)
        context = Context(self._attempt, self._send, self.book.written)
        others: dict[str, Action] = {name: Shielded(name, f, context) for name, f in self._factories.items()}
        self.restart = RestartAction(
            lambda: self.stalls.stacks.waiting,
            lambda case: self.end_job(case),
            written,
            lambda case: may_end(self._attempt, case),
        )
        self.evidence = EvidenceAction(self._attempt, self._send, self._informed)
        own: tuple[Action, ...] = (self.rollback, self.stalls.stacks, self.restart, self.evidence)
        self._actions = others | {action.name: action for action in own}
        self.attending_until = self.rewound_at = self.judged_to = -1
        self.stages_begun = 0
        self.interrupted.clear()

    def _new_stall_detector(self) -> StallDetector:
        return StallDetector(self.run.attempt, self._send, self._interrupt, self._dumped)

    def new_evaluator(self, incidents: int = 0) -> Evaluator:
        """Of the present attempt; `incidents`: how many there were in it."""
        offset, name = self._attempt.step_offset, self.run.name
        return Evaluator(self._rules, run=name, step_offset=offset, incidents=incidents, rewindable=self._offered)

    @property
    def _offered(self) -> bool:
        """Whether any rank offers rollback. Ranks that do not may leave, and one that does may be lost and be back."""
        return any(rank.hello.rollback is not None for rank in self._attempt.ranks.values())

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules that are applied."""
        return self._rules

    def preserve(self) -> None:
        """Put it into the history now: nobody may be told of anything that the next daemon would not know."""
        if self.store:
            self._save_state()
            self.store.flush()

    def _save_state(self) -> None:
        if self.store and self.judged_to >= 0:
            self.transitions(self.evaluator.settled(), time.monotonic())  # what the state has as fired is a case
            body, checkpoints = restoration.saved(self)
            self.store.state(self._attempt.number, self.judged_to, body, checkpoints)

    def _first_rank(self) -> int:
        return min((rank.identity.rank for rank in self._attempt.live), default=0)

    def _attend(self, seq: int) -> None:
        """Ask for every statistic at every step while something looks odd."""
        if not self.evaluator.suspicious:
            return
        steps = max(ATTEND_STEPS, math.ceil(ATTEND_SECONDS / max(self._attempt.step_seconds(), 1e-4)))
        if seq >= self.attending_until - steps // 2:
            self.attending_until = seq + steps
            for rank in self._attempt.live:
                self._send(rank.identity.rank, wire.Attend(steps=steps))

    def transitions(self, transitions: Sequence[Transition], now: float) -> None:
        """What the rules found: first kept, then acted on, then told."""
        told: list[tuple[Event, Case, tuple[str, ...]]] = []
        for transition in transitions:
            incident = transition.incident
            if transition.kind == "fired":
                told.append(("fired", self.book.opened(incident), incident.actions))
            elif (known := self.book.of(incident)) is not None:
                self.book.updated(known, incident)
                if transition.kind in ("resolved", "rolled_back"):
                    told.append(("resolved" if transition.kind == "resolved" else "rolled_back", known, ()))
                else:
                    self.notifier.changed(known)
                self.book.keep(known)
        if told:
            self.preserve()
        for event, case, actions in told:
            for name in actions:
                if name in self._actions:
                    self._actions[name].fired(case, now)
                    self.book.keep(case)
            if self.rollback.name in actions and self.rollback.phase == "idle":
                self.restart.fired(case, now)  # it could not be done in place
            self.notifier.tell(event, case)

    def _observe_between(self, observation: Observation | None, now: float) -> None:
        if observation is not None:
            self.transitions(self.evaluator.observe_between(self.clock.between(observation)), now)

    def _dumped(self, rank: int) -> None:
        self.book.dumped(self.evaluator.incidents, self.stalls.stacks.name)

    def _informed(self, what: str, seq: int) -> None:
        self.book.informed(self.evaluator.incidents, what, seq)

    def _take_up(self, now: float) -> None:
        """Roll back for those whose rollback was cut short."""
        waiting, self.interrupted = self.interrupted, []
        for case in waiting:
            if case.state == "firing":
                case.done = tuple(one for one in case.done if not one.startswith("rolling back"))
                self.rollback.fired(case, now)
                self.book.keep(case)

    def _rollback_ended(self, case: Case, outcome: Outcome) -> None:
        self._event(outcome.at, "rollback", **msgspec.to_builtins(outcome))
        if outcome.ok:
            self.rewound_at = outcome.at
            for other in self.cases.values():
                if other.state == "firing" and other is not case:
                    other.done = (case.done[-1],)
            self._attempt.rewind(outcome.to, outcome.at)
            self.publishing.rewound(outcome.to)
            self.transitions(self.evaluator.rewound(outcome.to, outcome.at), 0.0)
        else:
            self.tell(f"{case.alert}: {case.done[-1]}")
            if self.rollback.phase == "idle":  # else it goes on for another alert
                self.restart.fired(case, time.monotonic())
        self.book.written(case)
        self.preserve()

    def _print(self, notice: wire.Notice) -> None:
        self._send(self._first_rank(), notice)

    def _event(self, seq: int, kind: str, **detail: Any) -> None:
        if self.store:
            self.store.event(self._attempt.number, seq, kind, **detail)
