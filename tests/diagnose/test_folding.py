"""Which incidents are one problem, and which are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Confidence, Finding
from sentinel.diagnose.folding import (
    CRITICAL_REACH_STEPS,
    REACH_STEPS,
    IncidentSeverity,
    explain_effect,
    find_parent,
    find_successor,
    find_worst,
    is_over,
)
from tests.notify.cases import case
from tests.stock import RULES

WORDS = {word for rule in RULES.values() for word in rule.consequence_of}
PROBLEMS = {rule.problem for rule in RULES.values()}


def incident(identity: str, step: int, problem: str = "training", *, parent: str = "", **more: Any) -> Case:
    """Return an incident that began and fired at a step."""
    made = case(identity, more.pop("state", "firing"), severity=more.pop("severity", "warning"))
    opened = parent or identity
    return msgspec.structs.replace(
        made, problem=problem, problem_id=opened if problem else "", parent=parent, first_step=step, step=step, **more
    )


def over(one: Case, step: int) -> Case:
    return msgspec.structs.replace(one, state="resolved", resolved_step=step, resolved_time=one.time + step - one.step)


def later(one: Case, seconds: float) -> Case:
    return msgspec.structs.replace(one, time=one.time + seconds)


def parent_of(new: Case, *others: Case, consequence_of: tuple[str, ...] = ()) -> str:
    found = find_parent(msgspec.structs.replace(new, consequence_of=consequence_of), others)
    return found.id if found else ""


@pytest.mark.parametrize(
    ("incidents", "worst"),
    [
        ([("1", "", "warning"), ("2", "1", "critical"), ("3", "", "critical")], ("1", "", "critical")),
        ([("1", "", "info"), ("2", "", "warning"), ("3", "2", "info")], ("2", "", "warning")),
        ([("2", "1", "critical")], ("2", "1", "critical")),  # its origin is over, and is not among them
    ],
)
def test_the_worst_problem_has_the_name_of_its_origin_and_the_severity_of_its_worst_member(
    incidents: list[tuple[str, str, str]], worst: tuple[str, str, str]
) -> None:
    assert find_worst(IncidentSeverity(*one) for one in incidents) == worst


def test_an_incident_close_to_another_of_the_same_problem_is_a_consequence() -> None:
    assert parent_of(incident("0.2", 130), incident("0.1", 100)) == "0.1"


@pytest.mark.parametrize("apart", [0, 5, 50, 500])
def test_another_problem_stands_alone_however_close(apart: int) -> None:
    leak = incident("0.1", 100, "memory", severity="critical")
    assert parent_of(incident("0.2", 100 + apart), leak) == ""
    assert parent_of(incident("0.2", 100 + apart, ""), leak, incident("0.3", 100, "")) == ""


@pytest.mark.parametrize(("severity", "reach"), [("warning", REACH_STEPS), ("critical", CRITICAL_REACH_STEPS)])
def test_a_lasting_incident_does_not_explain_one_that_begins_much_later(severity: str, reach: int) -> None:
    lasting = incident("0.1", 100, severity=severity)
    assert parent_of(later(incident("0.2", 100 + reach), 61), lasting) == "0.1"
    assert parent_of(later(incident("0.2", 101 + reach), 61), lasting) == ""


def test_in_a_loop_of_milliseconds_a_lasting_incident_covers_another_critical_one_for_a_minute() -> None:
    lasting = incident("0.1", 100, severity="critical")
    new = incident("0.2", 20_000, severity="critical")
    assert parent_of(later(new, 59), lasting) == "0.1"
    assert parent_of(later(new, 61), lasting) == ""


def test_a_critical_incident_does_not_join_a_problem_that_was_paged_long_ago() -> None:
    chronic = incident("0.1", 100, "gradients-kept")
    first = incident("0.2", 9000, severity="critical")
    assert parent_of(first, chronic, consequence_of=("gradients-kept",)) == "0.1"
    known = msgspec.structs.replace(first, parent="0.1", problem_id="0.1")
    late = 9001 + CRITICAL_REACH_STEPS
    assert parent_of(incident("0.3", late), chronic, known, consequence_of=("gradients-kept",)) == "0.1"
    severe = later(incident("0.3", late, severity="critical"), 61)
    assert parent_of(severe, chronic, known, consequence_of=("gradients-kept",)) == ""


def test_a_critical_incident_does_not_join_a_problem_whose_paged_incident_is_over() -> None:
    chronic = incident("0.1", 100, "accumulation")
    spike = over(incident("0.2", 50_000, severity="critical"), 50_060)
    known = msgspec.structs.replace(spike, parent="0.1", problem_id="0.1")
    for severity, parent in (("critical", ""), ("warning", "0.1")):
        new = later(incident("0.3", 51_000, severity=severity), 1000)
        assert parent_of(new, chronic, known, consequence_of=("accumulation",)) == parent


def test_a_cause_that_is_seen_after_its_effect_joins_it_where_it_is_close() -> None:
    effect = incident("0.1", 100, "progress", consequence_of=("hardware",))
    assert parent_of(incident("0.2", 105, "hardware"), effect) == "0.1"
    assert parent_of(incident("0.2", 105, "uneven"), effect) == ""
    assert parent_of(incident("0.2", 101 + REACH_STEPS, "hardware"), effect) == ""


def test_only_a_certain_cause_explains_an_effect_and_no_cause_is_passed_on_twice() -> None:
    def explain_case(one: Case, confidence: Confidence) -> Case:
        return msgspec.structs.replace(one, diagnosis=Finding("a cause", confidence, ""))

    origin = explain_case(incident("0.1", 100, "gradients-kept"), "high")
    effect = explain_case(incident("0.2", 105, "training", consequence_of=("gradients-kept",)), "none")
    last = explain_case(incident("0.3", 110, "progress", consequence_of=("training",)), "none")
    assert explain_effect(effect, explain_case(origin, "medium")) is effect.diagnosis
    found = explain_effect(effect, origin)
    assert (found.cause, found.confidence) == (f"as of {origin.alert} (0.1): a cause", "medium")
    assert explain_effect(last, msgspec.structs.replace(effect, diagnosis=found)) is last.diagnosis


def test_two_alerts_without_a_problem_are_not_the_same_problem() -> None:
    member = msgspec.structs.replace(incident("0.2", 110, ""), parent="0.1", problem_id="0.1")
    assert parent_of(incident("0.3", 120, ""), incident("0.1", 100), member) == ""


@pytest.mark.parametrize(
    "alerts",
    [
        ("GpuFault", "RankLost"), ("GpuFault", "NonFiniteLoss"), ("ReplicaDivergence", "LossSpike"),
        ("ReplicaDivergence", "NonFiniteLoss"), ("UnevenBatches", "Hang"), ("UnevenBatches", "CollectiveDesync"),
        ("AccumulationNotNormalised", "Divergence"), ("AccumulationNotNormalised", "GradientSpike"),
        ("HostMemoryLow", "RankLost"), ("SchedulerMisused", "ParametersNotUpdated"),
        ("ClipBeforeUnscale", "LostUpdates"),
    ],
)  # fmt: skip
def test_an_alert_and_what_it_brings_about_are_one_problem_whichever_is_seen_first(alerts: tuple[str, str]) -> None:
    cause, effect = (stock(alert, 100) for alert in alerts)
    assert find_parent(msgspec.structs.replace(effect, id="0.2"), [cause]) is cause
    assert find_parent(msgspec.structs.replace(cause, id="0.2"), [effect]) is effect


@pytest.mark.parametrize(
    "alerts",
    [
        ("GpuFault", "Hang"), ("Fragmentation", "MemoryPressure"), ("ParametersNotInOptimizer", "UnusedParameters"),
        ("ParametersNotUpdated", "OptimizerStateCorrupt"),
    ],
)  # fmt: skip
def test_what_an_alert_brings_about_joins_it_as_long_as_it_fires(alerts: tuple[str, str]) -> None:
    cause, effect = stock(alerts[0], 100), msgspec.structs.replace(stock(alerts[1], 1000), id="0.2")
    assert find_parent(effect, [cause]) is cause


@pytest.mark.parametrize(
    "alerts",
    [
        ("SchedulerMisused", "ParametersNotInOptimizer"), ("ParametersNotInOptimizer", "LowPrecisionAccumulation"),
        ("ClipBeforeUnscale", "SchedulerMisused"), ("GpuFault", "MemoryCreep"), ("UnevenBatches", "NonFiniteLoss"),
    ],
)  # fmt: skip
def test_two_independent_mistakes_are_two_problems_though_they_come_together(alerts: tuple[str, str]) -> None:
    first, second = (stock(alert, 100) for alert in alerts)
    assert find_parent(msgspec.structs.replace(second, id="0.2"), [first]) is None
    assert find_parent(msgspec.structs.replace(first, id="0.2"), [second]) is None


def stock(alert: str, step: int) -> Case:
    """Return an alert of a stock rule, which fired at a step and opened a problem."""
    rule = RULES[alert]
    made = incident("0.1", step, rule.problem or "none", severity=rule.severity)
    return msgspec.structs.replace(made, alert=alert, problem=rule.problem, consequence_of=tuple(rule.consequence_of))


def test_the_last_member_counts_as_close_and_the_parent_stays_the_same() -> None:
    members = [incident("0.1", 100), incident("0.2", 250, parent="0.1"), incident("0.3", 420, parent="0.1")]
    assert parent_of(incident("0.4", 600), *members) == "0.1"


def test_an_incident_joins_a_problem_that_its_rule_or_cause_names_as_long_as_that_fires() -> None:
    chronic = incident("0.1", 100, "gradients-kept")
    assert parent_of(incident("0.2", 9000), chronic, consequence_of=("gradients-kept",)) == "0.1"
    assert parent_of(incident("0.2", 9000), over(chronic, 300), consequence_of=("gradients-kept",)) == ""
    killed = incident("0.2", 9000, "memory", diagnosis=Finding("killed by the kernel", "high", problem="memory"))
    assert parent_of(killed, incident("0.1", 100, "memory")) == "0.1"


def test_an_alert_that_returns_soon_is_the_same_problem_and_later_another() -> None:
    ended = over(incident("0.1", 100), 160)
    assert parent_of(later(incident("0.2", 300), 200), ended) == "0.1"
    assert parent_of(later(incident("0.2", 161 + REACH_STEPS), 300), ended) == ""
    # In a loop of milliseconds a minute is more than 200 steps.
    assert is_over([ended], 161 + REACH_STEPS, ended.time + 61) is False
    assert is_over([ended], 161 + REACH_STEPS, ended.time + 121)


@pytest.mark.parametrize("passed", [1800, -3600 + 1800])
def test_a_clock_that_was_set_back_keeps_no_critical_incident_quiet(passed: int) -> None:
    """After half an hour and 50,000 steps. The second one was a consequence until the clock had caught up."""
    lasting = incident("0.1", 1000, severity="critical")
    new = later(incident("0.2", 51_000, severity="critical"), passed)
    assert parent_of(new, lasting) == ""
    chronic = incident("0.1", 100, "accumulation")
    ended = msgspec.structs.replace(
        over(incident("0.2", 50_000, severity="critical"), 50_060), parent="0.1", problem_id="0.1"
    )
    again = later(incident("0.3", 50_000 + CRITICAL_REACH_STEPS, severity="critical"), passed)
    assert parent_of(again, chronic, ended, consequence_of=("accumulation",)) == ""


def test_a_clock_that_was_set_back_does_not_delay_the_end_of_a_problem() -> None:
    ended = over(incident("0.1", 100), 160)
    assert is_over([ended], 161 + REACH_STEPS, ended.time - 3600)
    assert is_over([ended], 160 + REACH_STEPS, ended.time - 3600) is False


def test_the_end_without_a_step_is_not_taken_for_one_before_the_clock_was_set_back() -> None:
    """It has the time at which it was made. In a loop of slow steps the last step may have been minutes before."""
    ended = msgspec.structs.replace(incident("0.1", 100), state="resolved", resolved_time=2e9)
    assert is_over([ended], 500, 2e9 - 300) is False
    assert is_over([ended], 500, 2e9 + 61)


def test_attempts_have_problems_of_their_own() -> None:
    assert parent_of(incident("1.1", 110, attempt=1), incident("0.1", 100)) == ""


def test_the_most_severe_consequence_succeeds_a_resolved_parent() -> None:
    parent = over(incident("0.1", 100), 160)
    mild, severe = incident("0.2", 110, parent="0.1"), incident("0.3", 120, parent="0.1", severity="critical")
    assert find_successor(parent, [parent, mild, severe]) is severe
    assert find_successor(parent, [parent, over(mild, 170)]) is None


def test_a_problem_that_a_stock_rule_may_follow_from_is_one_of_a_stock_rule() -> None:
    assert WORDS <= PROBLEMS
