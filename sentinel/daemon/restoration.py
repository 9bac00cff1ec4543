"""A daemon goes on where another one was killed, from the history of the run.

    the attempt     its ranks, layer tables, last steps; what is waited for is what comes after the last step kept
    the rules       their state as it was last kept, and the steps since, judged once more
    incidents       the cases; one that is open stays the one that it is
    rollbacks       those that were done, which count against the budget, and one that was committed

The state of the rules is used where rules and version are the same. Else the last `RECENT_STEPS` steps are judged anew:
windows are full again, and what is since the start (`first`, `lowest`, `highest`, `warmup`) begins there. What was
open stays open if it still holds, under its old id, and ends else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sentinel import __version__, wire
from sentinel.actions.rollback import WAITS
from sentinel.actions.rollback_state import Saved
from sentinel.daemon.clock import Clock
from sentinel.diagnose.case import Case
from sentinel.engine import LAYOUT, Rule, StateError, Transition
from sentinel.runs import RECENT_STEPS, Attempt, Rank, Stage
from sentinel.steps import Step
from sentinel.store import History

if TYPE_CHECKING:
    from sentinel.daemon.watched_run import WatchedRun

log = logging.getLogger(__name__)


class State(msgspec.Struct):
    """What is kept, beside what the history is about."""

    digest: str
    """Of the rules that have this state."""
    rules: bytes
    rollbacks: Saved
    rewound_at: int
    attending_until: int
    clock: tuple[float, float] | None = None
    stages: int = 0
    """Of those that were announced, as many had begun."""


def saved(watch: WatchedRun) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The state, and the older ones that a rollback may need."""
    rules, checkpoints = watch.evaluator.saved()
    rollbacks, clock = watch.rollback.saved(), watch.clock.saved()
    state = State(
        digest(watch.rules), rules, rollbacks, watch.rewound_at, watch.attending_until, clock, watch.stages_begun
    )
    return msgspec.msgpack.encode(state), checkpoints


def digest(rules: Sequence[Rule]) -> str:
    """Of the rules' text, the version, and how states are laid out: what a state must fit to."""
    parts = [__version__, str(LAYOUT), *(rule.text for rule in rules)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def resume(watch: WatchedRun, path: Path, hello: wire.Hello, now: float) -> list[Transition]:
    """Put a watched run where the history at `path` ends, before it gets its first hello, which is this one.

    Answers what the rules found since and nobody has been told of. An attempt that is over, or that this rank is not
    of, is only counted. Raises ConfigError where the history cannot be read.
    """
    with History(path) as history:
        attempts = history.attempts()
        if not attempts:
            return []
        number, _, ended = attempts[-1]
        watch.run.attempt = Attempt(number + 1, now)  # unless it turns out that this rank goes on
        watch.book.add(msgspec.convert(history.incidents(), list[Case]))
        ranks = {rank: _rank(kept.hello, kept.process, kept.gone, now) for rank, kept in history.ranks(number).items()}
        if not _belongs(hello.identity, ranks, over=ended is not None):
            watch.begin_attempt()
            return []
        steps = _valid(history, number)
        attempt = watch.run.attempt = Attempt(number, now)
        attempt.tables.update(
            (key, msgspec.msgpack.decode(body, type=wire.LayerTable)) for key, body in history.tables(number).items()
        )
        attempt.resume(ranks, steps, history.last_seq(number))
        attempt.stages += [
            Stage(event.seq, event.detail["name"]) for event in history.events("stage") if event.attempt == number
        ]
        watch.begin_attempt()
        return _judged(watch, history, steps, now)


def _belongs(identity: wire.Identity, ranks: Mapping[int, Rank], *, over: bool) -> bool:
    known = ranks.get(identity.rank)
    if known is not None:
        return known.identity.session == identity.session
    return bool(ranks) and not over


def _rank(hello: bytes, process: int, gone: bool, now: float) -> Rank:
    rank = Rank(msgspec.msgpack.decode(hello, type=wire.Hello), now)
    rank.state, rank.process = ("gone" if gone else "lost"), process
    return rank


def _valid(history: History, number: int) -> list[Step]:
    """The last steps, but those that a rollback took back."""
    undone = [
        (event.detail["to"], event.detail["at"])
        for event in history.events("rollback")
        if event.attempt == number and event.detail["ok"]
    ]
    steps = history.steps(attempt=number, after=history.last_seq(number) - RECENT_STEPS)
    return [step for step in steps if not any(to < step.seq <= at for to, at in undone)]


def _judged(watch: WatchedRun, history: History, steps: list[Step], now: float) -> list[Transition]:
    number = watch.attempt.number
    seq, state = _state(history, number)
    try:
        if state is None or state.digest != digest(watch.rules):
            raise StateError("there is no state that fits rules and version")
        if state.clock is not None:
            watch.clock = Clock(watch.attempt, state.clock)
            watch.clock.look()
        past = (watch.clock.of_step(step) for step in steps if step.seq <= seq)
        watch.evaluator.restore(state.rules, history.checkpoints(number), past)
        watch.stages_begun = state.stages
    except StateError as error:
        log.warning("run %s: the last %d steps are judged anew: %s", watch.run.name, len(steps), error)
        transitions = _anew(watch, steps)
    else:
        transitions = []
        for step in steps:
            if step.seq > seq:
                transitions += [*watch.begin_stages(step.seq), *watch.evaluator.observe(watch.clock.of_step(step))]
    watch.judged_to = steps[-1].seq if steps else seq
    if state is not None:
        watch.rewound_at, watch.attending_until = state.rewound_at, state.attending_until
        watch.rollback.resume(state.rollbacks, watch.cases, now)
        watch.interrupted = _interrupted(watch, state.rollbacks.case)
    return transitions


def _state(history: History, number: int) -> tuple[int, State | None]:
    kept = history.state(number)
    if kept is None:
        return -1, None
    try:
        return kept[0], msgspec.msgpack.decode(kept[1], type=State)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return kept[0], None


def _anew(watch: WatchedRun, steps: Sequence[Step]) -> list[Transition]:
    """Judge without a state. What is open by then, and is known, is what it was; what is not any more, ends."""
    mine = list(watch.book.present())
    last = max((int(case.id.partition(".")[2]) for case in mine), default=0)
    watch.evaluator = watch.new_evaluator(incidents=last)
    fired: dict[str, Transition] = {}
    for step in steps:
        for transition in (*watch.begin_stages(step.seq), *watch.evaluator.observe(watch.clock.of_step(step))):
            if transition.kind == "fired":
                fired[transition.incident.rule] = transition
            elif transition.kind == "resolved":
                fired.pop(transition.incident.rule, None)
    open_cases = {case.alert: case for case in mine if case.state == "firing"}
    for rule, transition in list(fired.items()):
        if (case := open_cases.pop(rule, None)) is not None:
            transition.incident.id = int(case.id.partition(".")[2])
            del fired[rule]
    for case in open_cases.values():
        case.state, case.resolved_step = "resolved", watch.attempt.closed_to + watch.attempt.step_offset
        case.resolved_time = steps[-1].time if steps else case.time
        watch.book.keep(case)
    return list(fired.values())


def _interrupted(watch: WatchedRun, committed: str) -> list[Case]:
    """Cases whose rollback was asked for, or would have been, and neither committed nor over."""
    found = []
    for incident in watch.evaluator.incidents:
        case = watch.cases.get(f"{watch.attempt.number}.{incident.id}")
        asked = incident.state == "firing" and watch.rollback.name in incident.actions
        if not asked or case is None or case.id == committed:
            continue
        if not case.done or WAITS in case.done or case.done[-1].startswith("rolling back"):
            found.append(case)
    return found
