"""PagerDuty: the events it gets, within its limits, and the meaning of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from sentinel.config import settings
from sentinel.notify import Delivery, Message, Origin
from sentinel.notify.receivers import pagerduty
from tests.notify import hostile
from tests.notify.cases import ORIGIN, case
from tests.notify.vendors import ROUTING_KEY, PagerDuty, Reply, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PagerDuty]:
    vendor = PagerDuty()
    monkeypatch.setenv("PD_KEY", ROUTING_KEY)
    with serving(vendor):
        yield vendor


def message(*cases: object, **more: object) -> Message:
    return Message(run="train", run_id="r1", alert="LossSpike", cases=cases or (case(ranks=64),), **more)  # type: ignore[arg-type]


def told(server: PagerDuty, *messages: Message) -> list[Delivery]:
    async def deliver() -> list[Delivery]:
        receiver = pagerduty.PagerDuty(
            settings.ReceiverSettings(name="oncall", type="pagerduty", token_env="PD_KEY", url=server.url)
        )
        try:
            return [await receiver.deliver(one) for one in messages]
        finally:
            await receiver.close()

    return asyncio.run(deliver())


def test_one_incident_of_64_ranks_is_one_page_and_it_resolves_itself(server: PagerDuty) -> None:
    assert (
        told(server, message(case(ranks=1)), message(case(ranks=64)), message(case(state="resolved")))
        == [Delivery()] * 3
    )
    first, more, over = (server.next() for _ in range(3))
    assert first["dedup_key"] == more["dedup_key"] == over["dedup_key"] == message().key
    assert [one["event_action"] for one in (first, more, over)] == ["trigger", "trigger", "resolve"]
    assert server.open == set()
    payload = first["payload"]
    assert payload["summary"] == f"LossSpike in train: {case().summary}"
    assert (payload["severity"], payload["source"], payload["class"]) == ("critical", "train", "LossSpike")
    assert payload["timestamp"] == "1970-01-12T13:46:40.000Z"
    details = more["payload"]["custom_details"]
    assert details["where"] == "rank 0, 1, 2 and 61 more"
    assert details["do"] == "look at it"
    assert details["runbook"] == "docs/runbook.md#loss-spike"


def test_the_link_of_the_settings_is_there(server: PagerDuty) -> None:
    told(server, message(origin=Origin(dashboard="https://grafana.example/d/run")))
    event = server.next()
    assert event["client_url"] == event["links"][0]["href"] == "https://grafana.example/d/run"


def test_links_host_and_user_are_in_the_event(server: PagerDuty) -> None:
    told(server, message(origin=ORIGIN))
    event = server.next()
    assert {link["text"]: link["href"] for link in event["links"]} == {
        "page": "https://page.example/r1", "report": "https://files.example/r1.html",
        "runbook": "https://wiki.example/runbook#loss-spike",
    }  # fmt: skip
    details = event["payload"]["custom_details"]
    assert (details["host"], details["user"], details["runbook"]) == ("node-7", "ada", event["links"][-1]["href"])


def test_a_rollback_resolves_the_page_and_is_a_change_event(server: PagerDuty) -> None:
    undone = case(state="rolled_back")
    undone.done = ("rolled back to step 400",)
    assert told(server, message(undone)) == [Delivery()]
    resolve, changed = server.next(), server.next()
    assert (resolve["event_action"], changed["path"]) == ("resolve", "/v2/change/enqueue")
    assert changed["payload"]["summary"] == "train was rolled back: rolled back to step 400"


def test_a_rollback_that_was_sent_before_is_no_second_change_event(server: PagerDuty) -> None:
    """As long as a problem lasts, each of its messages has all of its incidents."""
    former, again = case("0.1", "rolled_back"), case("0.2")
    repeated = message(former, again, unchanged=frozenset({"0.1"}))
    assert told(server, message(former, again), repeated) == [Delivery()] * 2
    assert [event["path"] for event in server.all()] == ["/v2/enqueue", "/v2/change/enqueue", "/v2/enqueue"]


def test_a_case_that_fires_again_keeps_the_page_open(server: PagerDuty) -> None:
    told(server, message(case("0.1", "resolved"), case("0.2")))
    assert server.next()["event_action"] == "trigger"


@pytest.mark.slow
def test_200_incidents_with_hostile_texts_are_all_accepted(server: PagerDuty) -> None:
    cases = hostile.cases(200)
    messages = [
        Message(
            run=one.run, run_id="r1", alert=one.alert, cases=(one,), origin=Origin(dashboard="https://h/" + "x" * 3000)
        )
        for one in cases
    ]
    for one in cases[:50]:
        one.state = "rolled_back"
    found = told(server, *messages)
    assert server.refused == []
    assert {delivery.fault for delivery in found} == {None}
    assert len(server.all()) == 250
    assert len(server.open) == 150


@pytest.mark.parametrize(
    ("answer", "fault", "retry"),
    [
        ((400, {}, b'{"status":"invalid event"}'), "rejected", False),
        ((413, {}, b""), "rejected", False),
        ((429, {"Retry-After": "30"}, b""), "rate limited", True),
        ((500, {}, b""), "server error", True),
        ((503, {}, b""), "server error", True),
    ],
)
def test_what_an_answer_means(server: PagerDuty, answer: Reply, fault: str, retry: bool) -> None:
    server.answers.append(answer)
    (found,) = told(server, message())
    assert (found.fault, found.retry, found.after) == (fault, retry, 30.0 if fault == "rate limited" else 0.0)
    assert told(server, message()) == [Delivery()]


def test_a_wrong_key_is_refused_and_a_missing_one_reported(server: PagerDuty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_KEY", "r" * 32)
    (found,) = told(server, message())
    assert (found.fault, found.detail) == ("rejected", "it answers 400")
    monkeypatch.delenv("PD_KEY")
    (missing,) = told(server, message())
    assert (missing.fault, missing.retry) == ("settings", True)
    assert "PD_KEY is empty or not set" in missing.detail
