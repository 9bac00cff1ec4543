"""One problem, many alerts: which incident is a consequence of which, and when the problem is over.

The rule files say which alerts may belong together: `problem` and `consequence_of`. A cause may be a sign of another
problem than its rule (`Finding.problem`), and is then judged by that. A problem is identified by the id of the incident
that opened it, which never changes; its parent may become another of its incidents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

import msgspec

from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import SURENESS, Finding
from sentinel.text import rank_severity

REACH_STEPS = 200
"""Steps within which alerts on one problem belong together: the slowest rule on the effects of a jump of the rate takes
100 rows, and a divergence that came and went did so three times in 400 steps. Our judgement."""
CRITICAL_REACH_STEPS = 1024
"""The same while a critical alert of the problem fires, if these steps take at least `REACH_SECONDS`. The rarest
samples, by which a consequence is seen, are so far apart (docs/performance.md). A lasting divergence is no reason not
to report a NaN 50,000 steps later."""
REACH_SECONDS = 60.0
"""The least reach in seconds, for loops in which so many steps take less: the shortest time between two messages about
one problem."""


def find_parent(case: Case, others: Iterable[Case]) -> Case | None:
    """Return the first incident of the problem that a new incident belongs to; None: it is a problem of its own.

    An alert on the same problem joins where it began close to the last that joined, or further away while that is
    critical: a problem that lasts for days does not explain what comes then. What its rule or its cause names joins as
    long as that fires; and what the rule of a member names, where it began close to it: a cause may be seen after its
    effect. A critical one joins no problem whose notification is long past, or was for what is over: it would not be
    notified itself.
    """
    explaining = {*case.consequence_of, case.diagnosis.problem} - {""}
    same_attempt = [other for other in others if other.attempt == case.attempt and other.id != case.id]
    for members in reversed(group_by_problem(same_attempt)):
        changes = [_last_change(member) for member in members]
        last, last_time = max(step for step, _ in changes), max(time for _, time in changes)
        long_past = case.first_step > last + CRITICAL_REACH_STEPS and _is_far(case.time, last_time)
        critical = [member for member in members if member.severity == "critical"]
        if is_over(members, case.step, case.time):
            continue
        if case.severity == "critical" and critical and (long_past or is_over(critical, case.step, case.time)):
            continue
        firing = [member for member in members if member.state == "firing"]
        problems = {member.problem for member in members} - {""}
        lasts = any(member.state == "firing" for member in critical)
        close = case.first_step <= last + REACH_STEPS
        alike = case.problem in problems and (close or (lasts and not long_past))
        follows = firing and explaining & problems
        explains = close and any(may_explain(case, member) for member in firing)
        if alike or follows or explains:
            return next((member for member in members if not member.parent), members[0])
    return None


def _last_change(case: Case) -> tuple[float, float]:
    """Return the step and time at which an incident fired, or was over."""
    return (case.step, case.time) if case.state == "firing" else (case.resolved_step or 0, case.resolved_time or 0.0)


def explain_consequence(case: Case, parent: Case) -> Finding:
    """Return the diagnosis of a consequence of `parent`: where its own evidence shows nothing, the parent's cause, if
    that is certain. Only `medium`: the rule files say that it may be a consequence, nothing was measured."""
    known = parent.diagnosis
    if case.diagnosis.confidence != "none" or known.confidence != "high":
        return case.diagnosis
    return msgspec.structs.replace(
        known, cause=f"as of {parent.alert} ({parent.id}): {known.cause}", confidence="medium", problem="", leads=False
    )


def explain_effect(effect: Case, case: Case) -> Finding:
    """Return the diagnosis of `effect`, where little is known of it: the cause of `case`, if that is certain, if the
    rule of `effect` names it as a cause, and if it is not another sign of the same problem. Only `medium`, as above, so
    that no borrowed cause is lent on. What the rule does not name may be an effect of `effect`."""
    own, known = effect.diagnosis, case.diagnosis
    is_sure = case.problem != effect.problem and known.confidence == "high"
    explains = may_explain(case, effect) and is_sure and _is_near(case, effect) and _is_near(effect, case)
    if not explains or SURENESS[own.confidence] >= SURENESS["medium"]:
        return own
    return msgspec.structs.replace(
        known,
        cause=f"as of {case.alert} ({case.id}): {known.cause}",
        confidence="medium",
        evidence=(*own.evidence, *known.evidence),
        problem=own.problem,
        leads=False,
    )


def _is_near(case: Case, other: Case) -> bool:
    """Return whether it began while the other fired, or close after that."""
    return other.state == "firing" or case.first_step <= (other.resolved_step or 0) + REACH_STEPS


def may_explain(case: Case, effect: Case) -> bool:
    """Return whether the problem that `case` is a sign of causes the effect, by the effect's rule."""
    return case.problem in effect.consequence_of


def group_by_problem(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the incidents of each problem, in the order in which the problems and the incidents were opened."""
    folded = sorted((case for case in cases if case.problem_id), key=_order)
    return [list(members) for _, members in groupby(folded, key=lambda case: case.problem_id)]


class IncidentSeverity(NamedTuple):
    """What decides which of several incidents is the worst."""

    id: str
    parent: str
    severity: str


def find_worst(incidents: Iterable[IncidentSeverity]) -> IncidentSeverity:
    """Return the worst problem, of several the first: the incident that the others are consequences of, with the
    severity of the worst of them. There must be at least one incident."""
    known = {incident.id: incident for incident in incidents}
    worst = max(known.values(), key=lambda incident: rank_severity(incident.severity))
    return known.get(worst.parent, worst)._replace(severity=worst.severity)


def is_over(members: Iterable[Case], step: int, time: float) -> bool:
    """Return whether nothing of a problem fires, nor has fired until shortly before this step and time: it does not
    reopen."""
    return all(case.state != "firing" and _is_long_ended(case, step, time) for case in members)


def _is_long_ended(case: Case, step: int, time: float) -> bool:
    ended = case.resolved_time or 0.0
    if case.resolved_step is None:  # it ended between two steps, of which the last may have been minutes before
        return step > REACH_STEPS and time - ended > REACH_SECONDS
    return step - case.resolved_step > REACH_STEPS and _is_far(time, ended)


def _is_far(time: float, other: float) -> bool:
    """Return whether two wall times are further apart than the reach. A later event with a much earlier time means that
    the clock was set back between them; then only the steps tell how far apart they are."""
    return abs(time - other) > REACH_SECONDS


def find_successor(parent: Case, others: Iterable[Case]) -> Case | None:
    """Return the most severe, then oldest consequence that outlives an ended incident; None where none does."""
    firing = [case for case in others if case.parent == parent.id and case.state == "firing"]
    return min(firing, key=lambda case: (-case.level, *_order(case)), default=None)


def is_quiet(case: Case, others: Iterable[Case], shown: Callable[[Case], bool]) -> bool:
    """Return whether the problem was sent already, for a case at least as severe and not silenced."""
    return bool(case.problem_id) and any(
        other.problem_id == case.problem_id
        and _order(other) < _order(case)
        and other.level >= case.level
        and shown(other)
        for other in others
    )


def _order(case: Case) -> tuple[int, int, str, int]:
    attempt, _, problem = case.problem_id.rpartition("-")[2].partition(".")  # those of a job begin with the node
    return int(attempt or 0), int(problem or 0), case.problem_id, int(case.id.rpartition(".")[2])
