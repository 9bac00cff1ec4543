"""Which incidents are one problem, and which are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Finding
from sentinel.diagnose.folding import REACH_STEPS, IncidentSeverity, find_parent, find_successor, find_worst, is_over
from tests.notify.cases import case
from tests.stock import RULES

WORDS = {word for rule in RULES.values() for word in rule.consequence_of}
PROBLEMS = {rule.problem for rule in RULES.values()}


def incident(identity: str, step: int, problem: str = "training", *, parent: str = "", **more: Any) -> Case:
    """One that began and fired at a step."""
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
    found = find_parent(new, consequence_of, others)
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


def test_what_begins_close_to_one_on_the_same_problem_is_a_consequence() -> None:
    assert parent_of(incident("0.2", 130), incident("0.1", 100)) == "0.1"


@pytest.mark.parametrize("apart", [0, 5, 50, 500])
def test_another_problem_stands_alone_however_close(apart: int) -> None:
    leak = incident("0.1", 100, "memory", severity="critical")
    assert parent_of(incident("0.2", 100 + apart), leak) == ""
    assert parent_of(incident("0.2", 100 + apart, ""), leak, incident("0.3", 100, "")) == ""


def test_a_warning_that_lasts_does_not_explain_what_begins_much_later_and_a_critical_one_does() -> None:
    new = incident("0.2", 5000)
    assert parent_of(new, incident("0.1", 100)) == ""
    assert parent_of(new, incident("0.1", 100, severity="critical")) == "0.1"


def test_what_joined_last_counts_as_close_and_the_parent_is_the_same() -> None:
    members = [incident("0.1", 100), incident("0.2", 250, parent="0.1"), incident("0.3", 420, parent="0.1")]
    assert parent_of(incident("0.4", 600), *members) == "0.1"


def test_what_the_rule_or_the_cause_names_joins_as_long_as_that_fires() -> None:
    chronic = incident("0.1", 100, "gradients-kept")
    assert parent_of(incident("0.2", 9000), chronic, consequence_of=("gradients-kept",)) == "0.1"
    assert parent_of(incident("0.2", 9000), over(chronic, 300), consequence_of=("gradients-kept",)) == ""
    killed = incident("0.2", 9000, "memory", diagnosis=Finding("killed by the kernel", "high", problem="memory"))
    assert parent_of(killed, incident("0.1", 100, "memory")) == "0.1"


def test_what_comes_back_soon_is_the_same_problem_and_later_it_is_another() -> None:
    ended = over(incident("0.1", 100), 160)
    assert parent_of(later(incident("0.2", 300), 200), ended) == "0.1"
    assert parent_of(later(incident("0.2", 161 + REACH_STEPS), 300), ended) == ""
    # In a loop of milliseconds a minute is more than 200 steps.
    assert is_over([ended], 161 + REACH_STEPS, ended.time + 61) is False
    assert is_over([ended], 161 + REACH_STEPS, ended.time + 121)


def test_attempts_have_problems_of_their_own() -> None:
    assert parent_of(incident("1.1", 110, attempt=1), incident("0.1", 100)) == ""


def test_of_the_consequences_the_most_severe_outlives_first() -> None:
    parent = over(incident("0.1", 100), 160)
    mild, severe = incident("0.2", 110, parent="0.1"), incident("0.3", 120, parent="0.1", severity="critical")
    assert find_successor(parent, [parent, mild, severe]) is severe
    assert find_successor(parent, [parent, over(mild, 170)]) is None


def test_a_problem_that_a_stock_rule_may_follow_from_is_one_of_a_stock_rule() -> None:
    assert WORDS <= PROBLEMS
