"""Which messages one receiver gets, and when, by the tests' own clock."""

from __future__ import annotations

import math

import msgspec
import pytest

from sentinel.config.settings import Duration, Grouping
from sentinel.diagnose.case import Case
from sentinel.notify import Delivery
from sentinel.notify import entry as entries
from sentinel.notify.entry import Entry, pause
from tests.notify.cases import case

GROUPING = Grouping(wait=Duration(5), interval=Duration(60), repeat=Duration(3600))
LATER = Delivery(fault="server error", detail="it answers 500", retry=True)
NEVER = Delivery(fault="rejected", detail="it answers 404")
NOW = 1e9


def entry(*cases: Case) -> Entry:
    made = Entry(receiver="ops", alert="LossSpike")
    for one in cases:
        made.put(one, NOW, GROUPING)
    return made


def told(made: Entry, now: float) -> list[Case]:
    """Deliver the message that must be due, and return its cases."""
    assert made.due <= now
    cases = made.list_news()
    made.record_delivery(cases, now, GROUPING)
    return cases


def test_ranks_that_join_within_the_wait_are_in_the_first_message() -> None:
    made = entry(case(ranks=1))
    made.put(case(ranks=64), NOW + 4, GROUPING)
    assert made.due == NOW + 5
    (one,) = told(made, NOW + 5)
    assert len(one.members) == 64
    assert not made.pending


def test_ranks_that_join_later_are_an_update_and_not_a_second_alert() -> None:
    made = entry(case(ranks=1))
    told(made, NOW + 5)
    made.put(case(ranks=2), NOW + 6, GROUPING)
    made.put(case(ranks=3), NOW + 50, GROUPING)
    assert made.due == NOW + 65
    (update,) = told(made, NOW + 65)
    assert (update.id, len(update.members)) == ("0.1", 3)


def test_the_same_state_is_not_told_twice() -> None:
    made = entry(case())
    told(made, NOW + 5)
    made.put(case(), NOW + 6, GROUPING)
    assert not made.pending
    assert made.due == NOW + 5 + 3600


def test_what_still_fires_is_told_again_after_repeat_and_what_ended_is_not() -> None:
    made = entry(case())
    told(made, NOW + 5)
    assert told(made, NOW + 3605)[0].state == "firing"
    made.put(case(state="resolved"), NOW + 3700, GROUPING)
    assert told(made, NOW + 3705)[0].state == "resolved"
    assert made.due == math.inf


def test_ends_are_told_and_so_is_what_was_over_before_it_was_sent() -> None:
    made = entry(case())
    made.put(case(state="rolled_back"), NOW + 2, GROUPING)
    assert [one.state for one in told(made, NOW + 5)] == ["rolled_back"]
    made.put(case("0.2"), NOW + 10, GROUPING)
    assert [one.id for one in told(made, NOW + 65)] == ["0.2"]


def fired_and_over(severity: str = "critical") -> tuple[Case, Case]:
    fired, over = case(), case(state="resolved")
    fired.severity = over.severity = severity
    return fired, over


def tell_all(made: Entry) -> list[str]:
    """Deliver all due messages, and return the states of their cases in order."""
    found = list[str]()
    while made.pending:
        found += [one.state for one in told(made, made.due)]
    assert not made.cases
    return found


@pytest.mark.parametrize("wait", [0, 5])
@pytest.mark.parametrize(("severity", "states"), [("critical", ["firing", "resolved"]), ("warning", ["resolved"])])
def test_what_is_critical_and_soon_over_is_told_as_firing_first(wait: int, severity: str, states: list[str]) -> None:
    """A pager ignores the end of an alert that it does not know."""
    (fired, over), made = fired_and_over(severity), entry()
    grouping = Grouping(wait=Duration(wait), interval=Duration(60), repeat=Duration(3600))
    made.put(fired, NOW, grouping)
    made.put(over, NOW + 1e-5, grouping)
    assert tell_all(made) == states


def test_what_is_critical_and_over_before_its_message_is_due_is_told_as_firing_first() -> None:
    """Its message waits for the interval after that of an earlier incident: only its end was told."""
    (fired, over), made = fired_and_over(), entry()
    made.put(fired, NOW, GROUPING)
    told(made, NOW + 5)
    made.put(over, NOW + 100, GROUPING)
    told(made, NOW + 105)
    for state, now in (("firing", NOW + 110), ("resolved", NOW + 150)):
        made.put(case("0.2", state), now, GROUPING)
    assert made.due == NOW + 165
    assert tell_all(made) == ["firing", "resolved"]


def test_an_alert_is_told_as_firing_first_after_a_restart_or_a_failure_too() -> None:
    fired, over = fired_and_over()
    made = entry(fired)
    made.put(over, NOW + 2, GROUPING)
    made.resume_after(NOW + 100, GROUPING)
    assert made.record_failure(LATER, NOW + 101, GROUPING)
    over.done = ("the job is ended by its supervisor",)
    made.put(over, NOW + 102, GROUPING)
    assert tell_all(made) == ["firing", "resolved"]


@pytest.mark.parametrize("sending", [False, True], ids=["at rest", "while a message is on its way"])
def test_a_consequence_that_is_soon_over_and_no_news_ends_with_its_problem(sending: bool) -> None:
    """Its firing is not sent to a receiver whose messages cannot be edited, so its end must not wait for that."""
    made = Entry(receiver="ops", alert="Hang", problem_id="0.1", edits=False)
    cause, consequence = (msgspec.structs.replace(case(id_), problem_id="0.1", time=NOW) for id_ in ("0.1", "0.2"))
    cause.severity = consequence.severity = "critical"
    made.put(cause, NOW, GROUPING)
    cases = made.list_news()
    if not sending:
        made.record_delivery(cases, NOW + 5, GROUPING)
    over = {"state": "resolved", "resolved_time": NOW + 10}
    if sending:
        made.put(consequence, NOW + 6, GROUPING)
    made.put(msgspec.structs.replace(consequence, **over), NOW + 10, GROUPING)
    if sending:
        made.record_delivery(cases, NOW + 11, GROUPING)
    assert not made.pending
    made.put(msgspec.structs.replace(cause, **over), NOW + 100, GROUPING)
    assert [(one.id, one.state) for one in told(made, NOW + 105)] == [("0.1", "resolved"), ("0.2", "resolved")]


@pytest.mark.parametrize("first", [True, False], ids=["the first message", "an update"])
def test_a_more_severe_case_that_comes_while_a_message_is_on_its_way_is_told_after_the_wait(first: bool) -> None:
    """It waited for the interval, as an edit that notifies no one."""
    made = Entry(receiver="ops", alert="Mild", problem_id="0.1")
    mild, also, severe = (
        msgspec.structs.replace(case(id_, severity=severity), problem_id="0.1")
        for id_, severity in (("0.1", "warning"), ("0.2", "warning"), ("0.3", "critical"))
    )
    made.put(mild, NOW, GROUPING)
    if not first:
        told(made, NOW + 5)
        made.put(also, NOW + 6, GROUPING)
    sent, under_way = made.due, made.list_news()
    made.put(severe, sent + 1, GROUPING)
    made.record_delivery(under_way, sent + 2, GROUPING)
    assert (made.due, made.escalated) == (sent + 7, True)
    assert "0.3" in [one.id for one in told(made, made.due)]
    assert (made.pending, made.escalated) == (False, False)


def test_a_case_that_goes_on_while_many_come_and_go_is_not_told_as_new_again() -> None:
    made = Entry(receiver="ops", alert="Hang", problem_id="0.0")
    now = NOW
    for number in range(entries.TOLD + 10):
        fired = msgspec.structs.replace(case(f"0.{number}", severity="warning" if number else "critical"))
        made.put(msgspec.structs.replace(fired, problem_id="0.0"), now, GROUPING)
        told(made, now := made.due)
        assert (made.pending, made.escalated) == (False, False)
        if number:
            over = msgspec.structs.replace(case(f"0.{number}", "resolved", severity="warning"), problem_id="0.0")
            made.put(over, now, GROUPING)
            told(made, now := made.due)


def test_after_ten_minutes_without_an_answer_only_the_present_state_is_told() -> None:
    fired, over = fired_and_over()
    made = entry(fired)
    made.put(over, NOW + 2, GROUPING)
    assert made.record_failure(LATER, NOW + entries.LATE_SECONDS + 10, GROUPING)
    assert tell_all(made) == ["resolved"]


def test_what_another_page_has_before_it_was_told_is_not_told() -> None:
    fired, over = fired_and_over()
    made = entry(fired)
    made.move(over, NOW + 2, GROUPING)
    assert (made.cases, made.pending) == ({}, False)
    made.put(fired, NOW + 3, GROUPING)
    told(made, made.due)
    made.move(over, NOW + 70, GROUPING)
    assert tell_all(made) == ["resolved"]


def test_the_end_of_what_could_not_be_told_is_given_up_with_it() -> None:
    fired, over = fired_and_over()
    made = entry(fired)
    made.put(over, NOW + 2, GROUPING)
    assert not made.record_failure(NEVER, NOW + 5, GROUPING)
    assert not made.cases
    assert not made.pending


def test_what_changes_while_it_is_sent_is_sent_next() -> None:
    made = entry(case())
    under_way = made.list_news()
    made.put(case(state="resolved"), NOW + 6, GROUPING)
    made.record_delivery(under_way, NOW + 7, GROUPING)
    assert made.due == NOW + 67
    assert [one.state for one in told(made, NOW + 67)] == ["resolved"]


def test_a_silence_mutes_updates_and_repeats_of_what_was_told_and_not_its_end() -> None:
    made = entry(case(ranks=1))
    told(made, NOW + 5)
    silenced = case(ranks=2)
    silenced.silenced = "abc"
    made.put(silenced, NOW + 10, GROUPING)
    assert not made.pending
    assert made.list_news() == []
    made.put(case(ranks=2), NOW + 20, GROUPING)
    assert made.pending
    over = case(state="resolved", ranks=2)
    over.silenced = "abc"
    made.put(over, NOW + 30, GROUPING)
    assert [one.state for one in told(made, NOW + 65)] == ["resolved"]


def test_the_end_of_what_was_silenced_before_it_was_told_is_not_told() -> None:
    """In a job over several nodes the coordinator puts silenced cases, too."""
    fired, over = fired_and_over()
    fired.silenced = over.silenced = "3f9a1c"
    made = entry(fired)
    assert made.list_news() == []
    made.put(over, NOW + 70, GROUPING)
    assert (made.cases, made.list_news(), made.pending) == ({}, [], False)


def one_problem() -> tuple[Case, Case]:
    """Return the silenced parent of a problem, and a consequence that has ended."""
    parent, consequence = (msgspec.structs.replace(case(id_), problem_id="0.1") for id_ in ("0.1", "0.2"))
    return msgspec.structs.replace(parent, silenced="3f9a1c"), msgspec.structs.replace(consequence, state="resolved")


@pytest.mark.parametrize("edits", [True, False])
def test_while_only_a_silenced_case_fires_a_problem_is_not_told_as_over_nor_again(edits: bool) -> None:
    silenced, over = one_problem()
    made = Entry(receiver="ops", alert="LossSpike", problem_id="0.1", edits=edits)
    for one in (silenced, over):
        made.put(msgspec.structs.replace(one, silenced="", state="firing"), NOW, GROUPING)
    told(made, NOW + 5)
    made.put(silenced, NOW + 10, GROUPING)
    made.put(over, NOW + 100, GROUPING)
    assert (made.pending, made.list_news()) == (False, [])
    made.rest(made.due, GROUPING)
    another = msgspec.structs.replace(over, id="0.3", state="firing")
    made.put(another, NOW + 4000, GROUPING)
    assert [(one.id, one.state) for one in told(made, NOW + 4005)] == [("0.2", "resolved"), ("0.3", "firing")]
    made.put(msgspec.structs.replace(another, state="resolved"), NOW + 5000, GROUPING)
    assert (made.pending, made.list_news()) == (False, [])
    made.put(msgspec.structs.replace(silenced, state="resolved"), NOW + 6000, GROUPING)
    assert {one.state for one in told(made, NOW + 6005)} == {"resolved"}
    assert made.finished


def test_a_silenced_case_that_was_not_told_does_not_hold_back_the_end_of_its_problem() -> None:
    """The end was sent again after each `repeat`, and the silenced case not when its silence ended."""
    silenced, over = one_problem()
    made = Entry(receiver="ops", alert="LossSpike", problem_id="0.1", edits=False)
    made.put(msgspec.structs.replace(over, state="firing"), NOW, GROUPING)
    made.put(silenced, NOW + 1, GROUPING)
    told(made, NOW + 5)
    made.put(over, NOW + 100, GROUPING)
    assert [(one.id, one.state) for one in told(made, NOW + 105)] == [("0.2", "resolved")]
    assert (made.pending, made.list_news()) == (False, [])
    made.put(msgspec.structs.replace(silenced, silenced=""), NOW + 5000, GROUPING)
    assert [(one.id, one.state) for one in told(made, NOW + 5005)] == [("0.1", "firing")]


def test_a_receiver_that_is_down_for_an_hour_gets_one_message_with_what_is_true_then() -> None:
    made, now, attempts = entry(case()), NOW, 0
    while made.due < NOW + 3600:
        now, attempts = made.due, attempts + 1
        assert made.record_failure(LATER, now, GROUPING)
        if attempts == 3:
            made.put(case(state="resolved"), now, GROUPING)
    assert 10 < attempts < 40
    assert [one.state for one in told(made, made.due)] == ["resolved"]
    assert not made.pending
    assert not made.trouble


def test_pauses_double_up_to_a_limit_with_jitter() -> None:
    for attempts, longest in [(1, 1.0), (2, 2.0), (5, 16.0), (10_000, entries.LONGEST_PAUSE)]:
        found = [pause(attempts) for _ in range(200)]
        assert longest / 2 <= min(found) < max(found) <= longest


@pytest.mark.parametrize(("asked", "given"), [(90.0, 90.0), (1e12, entries.LONGEST_AFTER)])
def test_a_receiver_is_left_alone_for_as_long_as_it_asks_within_reason(asked: float, given: float) -> None:
    made = entry(case())
    made.record_failure(Delivery(fault="rate limited", retry=True, after=asked), NOW + 5, GROUPING)
    assert made.due == NOW + 5 + given
    made.hurry(NOW + 6)
    assert made.due == NOW + 5 + given


def test_what_will_never_be_accepted_is_given_up_at_once_and_the_rest_after_a_day() -> None:
    refused = entry(case())
    assert not refused.record_failure(NEVER, NOW + 5, GROUPING)
    assert not refused.pending
    assert refused.trouble == "it answers 404"
    old = entry(case())
    assert old.record_failure(LATER, NOW + entries.GIVE_UP_SECONDS, GROUPING)
    assert not old.record_failure(LATER, NOW + entries.GIVE_UP_SECONDS + 10, GROUPING)
    old.put(case(state="resolved"), NOW + entries.GIVE_UP_SECONDS + 20, GROUPING)
    assert old.pending


def test_the_end_of_a_run_sends_what_waits() -> None:
    made = entry(case())
    made.hurry(NOW + 1)
    assert made.due == NOW + 1


def test_a_clock_that_was_set_back_between_two_daemons_delays_nothing_for_long() -> None:
    made = entry(case())
    made.record_failure(LATER, NOW, GROUPING)
    back = NOW - 30 * 24 * 3600
    made.resume_after(back, GROUPING)
    assert made.due <= back + entries.LONGEST_AFTER
    assert made.record_failure(LATER, made.due, GROUPING)


def test_what_is_remembered_is_bounded() -> None:
    made = entry()
    for number in range(1000):
        made.put(case(f"0.{number}", "resolved"), NOW + number, GROUPING)
    assert len(made.cases) == entries.CASES
    for number in range(1000):
        made.put(case(f"0.{number}", "resolved"), NOW + number, GROUPING)
        made.record_delivery(made.list_news(), NOW + number, GROUPING)
    assert len(made.told) == entries.TOLD
