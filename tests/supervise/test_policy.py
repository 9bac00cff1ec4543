"""Decisions on what follows the end of a job, without processes."""

from __future__ import annotations

import pytest

from sentinel.errors import EXIT_STOPPED, EXIT_UNFINISHED
from sentinel.supervise.policy import Again, Over, Policy, is_same_fault
from sentinel.wire import JobFault


def crash(step: int | None, kind: str = "killed by SIGKILL") -> JobFault:
    return JobFault(kind=kind, words=kind, step=step)


def harm(sign: int, step: int, kind: str = "NonFiniteLoss") -> JobFault:
    return JobFault(kind=kind, words=kind, step=step, sign=sign)


def test_restarts_are_counted_and_pauses_double_up_to_a_limit() -> None:
    policy = Policy(9, pause=5.0)
    decided = [policy.decide(crash(1000 * number)) for number in range(10)]
    assert [each.pause for each in decided if isinstance(each, Again)] == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert decided[-1] == Over(EXIT_UNFINISHED, "all 9 restarts are used")


def test_the_same_fault_at_the_same_step_ends_it_whatever_came_between() -> None:
    policy = Policy(9)
    for fault in (crash(100), crash(500), crash(100, "Hang")):
        assert isinstance(policy.decide(fault), Again)
    decided = policy.decide(crash(501))
    assert isinstance(decided, Over)
    assert decided.status == EXIT_STOPPED
    assert "killed by SIGKILL came back at step 501" in decided.why


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (crash(100), crash(121)),  # steps of 0.1 s: two seconds are 20 of them
        (crash(100), crash(100, "Hang")),
        (crash(None), crash(None)),  # nothing is known of these
        (harm(sign=230, step=300), harm(sign=280, step=300)),
    ],
)
def test_different_faults_are_told_apart(first: JobFault, second: JobFault) -> None:
    assert not is_same_fault(second, first)


def test_faults_with_a_first_sign_are_compared_by_it() -> None:
    assert is_same_fault(harm(sign=230, step=300), harm(sign=230, step=400))


def test_short_steps_may_be_reported_further_apart() -> None:
    fault = JobFault(kind="Hang", words="", step=1000, step_seconds=0.001)
    assert is_same_fault(fault, JobFault(kind="Hang", words="", step=2900, step_seconds=0.001))
    assert not is_same_fault(fault, JobFault(kind="Hang", words="", step=3100, step_seconds=0.001))


def test_the_run_does_not_resume_from_what_was_saved_since_the_first_sign() -> None:
    policy = Policy(9)
    steps = [
        (harm(sign=230, step=300), 230),
        (crash(260), 230),  # saved at step 250 by the harmed start, and not written again yet
        (crash(290, "Hang"), 230),
        (crash(420), None),  # past it: all that is saved comes from healthy starts
        (harm(sign=600, step=640), 600),
        (harm(sign=550, step=630), 550),
        (crash(635), 550),
        (crash(641, "Hang"), None),
    ]
    for fault, before in steps:
        decided = policy.decide(fault)
        assert isinstance(decided, Again), fault
        assert decided.before == before, fault
