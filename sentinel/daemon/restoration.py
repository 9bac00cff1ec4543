"""Lets a daemon continue from the history of a run where another daemon was killed.

    the attempt     its ranks, layer tables, last steps; the next step expected is the one after the last step stored
    the rules       their state as last stored; the steps since then are judged again
    incidents       the cases; an open one stays the same incident
    rollbacks       the completed ones, which count against the budget, and a committed one

The stored state of the rules is used if rules and version are the same. Otherwise the last `RECENT_STEPS` steps are
judged again: windows are full then, and values since the start (`first`, `lowest`, `highest`, `warmup`) begin there. An
open incident stays open under its old id if its condition still holds, and otherwise ends. What is measured between
steps, such as memory of the host, cannot be judged again: an incident about that stays open until its rule has judged
new measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sentinel import wire
from sentinel.actions.rollback import WAITS
from sentinel.daemon.run.clock import Clock
from sentinel.daemon.run.incident_log import find_number
from sentinel.daemon.run.saved_state import SavedState, digest
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.engine import Rule, RuleStateError, Transition
from sentinel.runs import RECENT_STEPS, Attempt, Rank, Stage
from sentinel.runs.steps import RunStep
from sentinel.signals import CLOCK, OPENING_STEPS, SIGNALS
from sentinel.store import History

log = logging.getLogger(__name__)


def resume(watch: WatchedRun, path: Path, hello: wire.Hello, now: float) -> list[Transition]:
    """Restore a watched run from the history at `path`, before its first hello (`hello`) is handled.

    Returns the transitions of the rules that were not reported yet. An attempt that is over, or that this rank is not
    part of, is only counted. Raises ConfigError if the history cannot be read.
    """
    with History(path) as history:
        attempts = history.attempts()
        if not attempts:
            return []
        number, _, ended = attempts[-1]
        watch.run.began = attempts[0][1]
        watch.run.attempt = Attempt(number + 1, now)  # unless it turns out that this rank goes on
        watch.incidents.log.add(msgspec.convert(history.incidents(), list[Case]))
        ranks = {rank: _rank(kept.hello, kept.process, kept.gone, now) for rank, kept in history.ranks(number).items()}
        if not _belongs(hello.identity, ranks, over=ended is not None):
            watch.ingest.begin_attempt()
            return []
        steps = _valid(history, number)
        attempt = watch.run.attempt = Attempt(number, now)
        attempt.tables.update(
            (key, msgspec.msgpack.decode(body, type=wire.LayerTable)) for key, body in history.tables(number).items()
        )
        attempt.resume(ranks, steps, history.last_seq(number))
        attempt.stages += [
            Stage(event.seq, str(event.detail.get("name", "")))
            for event in history.events("stage")
            if event.attempt == number
        ]
        watch.ingest.begin_attempt()
        return _judge_missed(watch, history, steps, now)


def _belongs(identity: wire.Identity, ranks: Mapping[int, Rank], *, over: bool) -> bool:
    known = ranks.get(identity.rank)
    if known is not None:
        return known.identity.session == identity.session
    return bool(ranks) and not over


def _rank(hello: bytes, process: int, gone: bool, now: float) -> Rank:
    rank = Rank(msgspec.msgpack.decode(hello, type=wire.Hello), now)
    rank.state, rank.process = ("gone" if gone else "lost"), process
    return rank


def _valid(history: History, number: int) -> list[RunStep]:
    """Return the last steps without those that a rollback undid."""
    undone = [(to, at) for attempt, to, at in history.rollbacks() if attempt == number]
    steps = history.steps(attempt=number, after=history.last_seq(number) - RECENT_STEPS)
    return [step for step in steps if not any(to < step.seq <= at for to, at in undone)]


def _judge_missed(watch: WatchedRun, history: History, steps: list[RunStep], now: float) -> list[Transition]:
    number, incidents, actions = watch.run.attempt.number, watch.incidents, watch.actions
    seq, state = _state(history, number)
    try:
        if state is None or state.digest != digest(incidents.rules):
            raise RuleStateError("there is no state that fits rules and version")
        if state.clock is not None:
            incidents.clock = Clock(watch.run.attempt, state.clock)
            incidents.clock.look()
        past = (incidents.clock.of_step(step) for step in steps if step.seq <= seq)
        incidents.evaluator.restore(state.rules, history.checkpoints(number), past)
        incidents.stages_begun = state.stages
    except RuleStateError as error:
        log.warning("run %s: the last %d steps are judged again: %s", watch.run.name, len(steps), error)
        transitions = _anew(watch, steps)
    else:
        transitions = [found for step in steps if step.seq > seq for found in incidents.find_transitions(step)]
    incidents.judged_to = steps[-1].seq if steps else seq
    known = {incident.rule for incident in incidents.evaluator.incidents if incident.state == "firing"}
    unjudged = (case for case in _list_open(watch) if case.alert not in known)
    incidents.inherit(case for case in unjudged if _reads_measurements(incidents.rules, case))
    if steps and incidents.judged_to < OPENING_STEPS - 1:  # the opening examination goes on
        incidents.first_judged = steps[0].seq
    if state is not None:
        incidents.rewound_at, incidents.opening = state.rewound_at, state.opening
        actions.rollback.resume(state.rollbacks, incidents.log.cases, now)
        actions.interrupted = _list_interrupted(watch, state.rollbacks.case)
    return transitions


def _state(history: History, number: int) -> tuple[int, SavedState | None]:
    kept = history.state(number)
    if kept is None:
        return -1, None
    try:
        return kept[0], msgspec.msgpack.decode(kept[1], type=SavedState)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return kept[0], None


def _anew(watch: WatchedRun, steps: Sequence[RunStep]) -> list[Transition]:
    """Judge the steps without a saved state. A known incident that is open at the end goes on. Any other ends, except
    where steps alone do not decide it."""
    incidents, attempt = watch.incidents, watch.run.attempt
    last = max((find_number(case) for case in incidents.log.present() if not case.of_job), default=0)
    incidents.evaluator = incidents.new_evaluator(incidents=last)
    fired: dict[str, Transition] = {}
    for step in steps:
        for transition in incidents.find_transitions(step):
            if transition.kind == "fired":
                fired[transition.incident.rule] = transition
            elif transition.kind == "resolved":
                fired.pop(transition.incident.rule, None)
    open_cases = {case.alert: case for case in _list_open(watch)}
    for rule, transition in list(fired.items()):
        if (case := open_cases.pop(rule, None)) is not None:
            transition.incident.id = find_number(case)
            del fired[rule]
    for case in open_cases.values():
        if _reads_measurements(incidents.rules, case):
            continue
        case.state, case.resolved_step = "resolved", attempt.closed_to + attempt.step_offset
        case.resolved_time = steps[-1].time if steps else case.time
        watch.context.record_case(case)
    return list(fired.values())


def _list_open(watch: WatchedRun) -> list[Case]:
    """Return the open cases of the present attempt that this node judges."""
    return [case for case in watch.incidents.log.present() if case.state == "firing" and not case.of_job]


def _reads_measurements(rules: Sequence[Rule], case: Case) -> bool:
    """Whether the case's rule reads what is measured between steps, and is not stored with them."""
    metrics = next((rule.metrics for rule in rules if rule.name == case.alert), ())
    return any(name in SIGNALS and SIGNALS[name].tier == CLOCK for name in metrics)


def _list_interrupted(watch: WatchedRun, committed: str) -> list[Case]:
    """Return cases whose rollback or stop was requested, or was about to be, and is neither committed nor over."""
    found = []
    for incident in watch.incidents.evaluator.incidents:
        case = watch.incidents.log.find_case(incident)
        acts = {watch.actions.rollback.name, watch.actions.stop.name}
        asked = incident.state == "firing" and not acts.isdisjoint(incident.actions)
        if not asked or case is None or case.id == committed:
            continue
        if not case.done or WAITS in case.done or case.done[-1].startswith(("rolling back", "stopping")):
            found.append(case)
    return found
