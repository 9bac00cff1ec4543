"""Cases whose problem or severity changes after they were sent: nothing stays open, and what is worse is announced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from sentinel.cluster.protocol.job_incident import JobIncidents
from sentinel.cluster.protocol.messages import NodeCase
from sentinel.diagnose.case import Case
from sentinel.notify import DELIVERED, Delivery, Message
from sentinel.notify import pipeline as pipelines
from sentinel.notify.outbox import Outbox
from sentinel.notify.receivers.alertmanager import alerts as list_alerts
from sentinel.notify.receivers.webhook import payload
from tests.notify.cases import case
from tests.notify.test_pipeline import SLOW, Fake, pipeline, until


def one_problem() -> tuple[Case, Case, Case]:
    """Return the parent of a problem, its consequence, and that consequence as a problem of its own."""
    parent, consequence = (msgspec.structs.replace(case(id_), problem_id="0.1") for id_ in ("0.1", "0.2"))
    consequence.alert, consequence.parent = "NonFiniteLoss", "0.1"
    return parent, consequence, msgspec.structs.replace(consequence, problem_id="0.2", parent="")


def list_open(messages: list[Message]) -> tuple[set[str], set[str]]:
    """Return the keys of a pager's open incidents, and the fingerprints of a webhook's open alerts."""
    keys, alerts = dict[str, bool](), dict[str, str]()
    for message in messages:
        keys[message.group] = message.firing
        alerts |= {alert["fingerprint"]: alert["status"] for alert in payload(message, "ops")["alerts"]}
    return {key for key, fires in keys.items() if fires}, {one for one, state in alerts.items() if state == "firing"}


@pytest.mark.parametrize("when", ["while it is sent", "after it was sent", "after a restart"])
def test_a_consequence_that_becomes_a_problem_of_its_own_leaves_nothing_open(tmp_path: Path, when: str) -> None:
    async def scenario() -> None:
        parent, consequence, separate = one_problem()
        is_sent = asyncio.Event()

        class Slow(Fake):
            async def deliver(self, message: Message) -> Delivery:
                await super().deliver(message)
                await is_sent.wait()
                return DELIVERED

        fake = Slow()
        made = pipeline(Outbox(tmp_path / "r1.sqlite"), edits=True, ops=fake)
        made.put(parent)
        made.put(consequence)
        await fake.arrived.wait()
        if when == "while it is sent":
            made.put(separate)
        is_sent.set()
        await until(lambda: not made.pending)
        if when == "after it was sent":
            made.put(separate)
            await until(lambda: not made.pending)
        await made.close()
        made = pipeline(Outbox(tmp_path / "r1.sqlite"), edits=True, ops=fake)
        made.put(separate)
        await until(lambda: not made.pending)
        assert list_open(fake.got)[0] == {"r1/0.1", "r1/0.2"}
        assert len(list_open(fake.got)[1]) == 2
        for one in (separate, parent):
            made.put(msgspec.structs.replace(one, state="resolved", resolved_time=pipelines.steady()))
            await until(lambda: not made.pending)
            assert f"r1/{one.problem_id}" not in list_open(fake.got)[0]
        assert list_open(fake.got) == (set(), set())
        assert [len(entry.cases) for entry in made.entries] == [0, 0]
        await made.close()

    asyncio.run(scenario())


def test_a_consequence_that_becomes_a_problem_of_its_own_before_it_is_sent_is_no_news_about_the_former_one() -> None:
    """The receiver got the former problem once more, as if a more severe case had come."""

    async def scenario() -> None:
        parent, consequence, separate = one_problem()
        parent.severity = "warning"
        fake = Fake()
        made = pipeline(Outbox(None), SLOW, edits=True, ops=fake)
        made.put(parent)
        made.hurry()
        await until(lambda: len(fake.got) == 1 and not made.pending)
        made.put(consequence)
        made.put(separate)
        made.hurry()
        await until(lambda: not made.pending)
        assert [(message.group, message.escalated) for message in fake.got] == [("r1/0.1", False), ("r1/0.2", False)]
        await made.close()

    asyncio.run(scenario())


def test_a_more_severe_case_is_told_though_one_that_became_another_problem_was_as_severe() -> None:
    async def scenario() -> None:
        parent, consequence, separate = one_problem()
        parent.severity = "warning"
        fake = Fake()
        made = pipeline(Outbox(None), ops=fake)
        for one in (parent, consequence, separate, msgspec.structs.replace(consequence, id="0.3", alert="Divergence")):
            made.put(one)
            await until(lambda: not made.pending)
        assert [message.group for message in fake.got if message.escalated] == ["r1/0.1", "r1/0.1"]
        await made.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("again", [False, True], ids=["a third node joins", "a node fires again"])
@pytest.mark.parametrize("problem", ["", "training"])
@pytest.mark.parametrize("sending", [False, True], ids=["at rest", "while a message is on its way"])
def test_an_incident_of_a_job_that_becomes_critical_is_announced_and_leaves_nothing_open(
    again: bool, problem: str, sending: bool
) -> None:
    """Slack's message was only edited, or there was no message, and a webhook's warning stayed open."""

    async def scenario() -> None:
        is_sent = asyncio.Event()

        class Slow(Fake):
            async def deliver(self, message: Message) -> Delivery:
                await super().deliver(message)
                await is_sent.wait()
                return DELIVERED

        fake, incidents = Slow(), JobIncidents()
        made = pipeline(Outbox(None), edits=True, ops=fake)

        def add(node: int, identity: str, severity: str, state: str = "firing") -> None:
            one = case(identity, state, severity=severity)
            one.problem, one.problem_id = problem, identity if problem else ""
            incidents.add(node, NodeCase(number=1, case=one))
            for changed in incidents.take_changes():
                made.put(changed)

        add(0, "0.1", "warning")
        add(1, "0.1", "warning")
        if sending:
            await fake.arrived.wait()
        else:
            is_sent.set()
            await until(lambda: not made.pending)
        if again:
            add(0, "0.1", "warning", "resolved")
            add(0, "0.2", "critical")
        else:
            add(2, "0.2", "critical")
        is_sent.set()
        await until(lambda: not made.pending)
        assert [message.escalated for message in fake.got] == [False, True]
        assert fake.got[-1].leading.severity == "critical"
        assert len({message.group for message in fake.got}) == 1
        last = {alert["labels"]["severity"]: alert["status"] for alert in payload(fake.got[-1], "ops")["alerts"]}
        assert last == {"warning": "resolved", "critical": "firing"}
        ends = {alert["labels"]["severity"]: alert["endsAt"] for alert in list_alerts(fake.got[-1], 1e12)}
        assert ends["warning"] < ends["critical"]
        for node, identity in ((0, "0.1"), (0, "0.2"), (1, "0.1"), (2, "0.2")):
            add(node, identity, "warning", "resolved")  # a new coordinator may not know how severe it was
        await until(lambda: not made.pending)
        assert list_open(fake.got) == (set(), set())
        await made.close()

    asyncio.run(scenario())


def test_a_consequence_that_becomes_more_severe_than_its_problem_is_none_for_the_receiver() -> None:
    async def scenario() -> None:
        parent, consequence, _ = one_problem()
        parent.severity = consequence.severity = "warning"
        fake = Fake()
        made = pipeline(Outbox(None), edits=True, ops=fake)
        for one in (parent, consequence, msgspec.structs.replace(consequence, severity="critical")):
            made.put(one)
            await until(lambda: not made.pending)
        assert [(message.escalated, message.quiet) for message in fake.got[1:]] == [(False, {"0.2"}), (True, set())]
        assert len(list_open(fake.got)[1]) == 2
        await made.close()

    asyncio.run(scenario())


def test_a_receiver_of_warnings_gets_the_end_of_one_that_became_critical_before_it_was_sent() -> None:
    async def scenario() -> None:
        fake = Fake()
        made = pipeline(Outbox(None), SLOW, severities=["warning"], ops=fake)
        for severity, state in (("warning", "firing"), ("critical", "firing"), ("critical", "resolved")):
            made.put(case(severity=severity, state=state))
        made.hurry()
        await until(lambda: bool(fake.got))
        made.hurry()
        await until(lambda: not made.pending)
        assert list_open(fake.got) == (set(), set())
        await made.close()

    asyncio.run(scenario())
