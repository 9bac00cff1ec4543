"""The webhook: its payload, and how it treats consumers that answer, and those that do not."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import math
import re
import socket
from pathlib import Path

import httpx2
import msgspec
import pytest

from sentinel.cluster.protocol.job_incident import JobIncidents
from sentinel.cluster.protocol.messages import NodeCase
from sentinel.config import settings
from sentinel.diagnose.case import CaseMember
from sentinel.notify import Delivery, Message, Origin, wording
from sentinel.notify.http import Poster, seconds_after, verdict
from sentinel.notify.receivers.webhook import Webhook, moment, payload
from tests.notify.cases import ORIGIN, case
from tests.notify.consumer import CLOSE, GARBAGE, HANG, Answer, check, consumer

SECRET = "s3cr3ts3cr3ts3cr3ts3cr3t"


def message(*cases: object, **more: object) -> Message:
    return Message(run="train", run_id="r1", alert="LossSpike", cases=cases or (case(ranks=64),), **more)  # type: ignore[arg-type]


def delivered(url: str, timeout: float = 5.0) -> Delivery:
    async def deliver() -> Delivery:
        webhook = Webhook(
            settings.ReceiverSettings(name="ops", type="webhook", url=url, timeout=settings.Duration(timeout))
        )
        try:
            return await webhook.deliver(message())
        finally:
            await webhook.close()

    return asyncio.run(deliver())


@pytest.mark.parametrize(
    ("members", "summary", "where", "named"),
    [
        (
            [[("rank", "0"), ("rank", "1")], [("rank", "2"), ("rank", "3")]],
            "loss 9 (node 0; the same on node 1)", "ranks 0 to 3, on nodes 0, 1", "rank 0, rank 1, rank 2, rank 3",
        ),
        ([[("layer", "fc")]] * 2, "loss 9 (node 0; the same on node 1)", "layer fc, on nodes 0, 1", "layer fc"),
        ([[("run", "")]] * 2, "loss 9 (node 0; the same on node 1)", "nodes 0, 1", ""),
        ([[], [("rank", "2")]], "loss 9 (node 1)", "rank 2, on node 1", "rank 2"),
    ],
    ids=["ranks", "layers", "run", "one node"],
)  # fmt: skip
def test_texts_about_several_nodes_say_which_and_name_a_member_once(
    members: list[list[tuple[str, str]]], summary: str, where: str, named: str
) -> None:
    incidents = JobIncidents()
    for node, found in enumerate(members):
        of_node = tuple(CaseMember(scope, name, 456, {}) for scope, name in found)
        if of_node:
            given = msgspec.structs.replace(case(), members=of_node, summary="loss 9")
            incidents.add(node, NodeCase(number=1, case=given))
    (told,) = incidents.take_changes()
    assert wording.where(told) == where
    (alert,) = payload(message(told), "ops")["alerts"]
    assert alert["annotations"]["summary"] == summary
    assert alert["annotations"].get("members", "") == named
    assert alert["annotations"]["nodes"] == ", ".join(str(node) for node, found in enumerate(members) if found)


def test_the_payload_holds_the_documented_contract() -> None:
    for cases in [(case(ranks=64),), (case(state="resolved"),), (case("0.1", "rolled_back"), case("0.2"))]:
        check(payload(message(*cases), "ops"))


def test_one_incident_of_64_ranks_is_one_alert_that_says_what_to_do() -> None:
    body = payload(message(), "ops")
    (alert,) = body["alerts"]
    assert alert["labels"] == {"alertname": "LossSpike", "run": "train", "run_id": "r1", "severity": "critical"}
    assert alert["startsAt"] == "1970-01-12T13:46:40.000Z"
    assert alert["annotations"]["members"].endswith("rank 19 and 44 more")
    assert alert["annotations"]["remedy"] == "look at it"
    assert alert["annotations"]["first_step"] == "456"
    over = payload(message(case(state="resolved", ranks=64)), "ops")["alerts"][0]
    assert over["labels"] == alert["labels"]
    assert over["fingerprint"] == alert["fingerprint"]
    assert over["endsAt"] == "1970-01-12T13:47:40.500Z"


@pytest.mark.parametrize(
    "odd", ["\x1b[31mred\x1b[0m", "\ud800", "a\x00b", "\u202egnp.exe", "\U0001f525 \u0416 \u4e2d", '"}{\\']
)
def test_whatever_a_run_is_called_the_payload_is_plain_and_its_json_valid(odd: str) -> None:
    hostile = case()
    hostile.run = hostile.summary = odd
    body = json.loads(json.dumps(payload(Message(run=odd, run_id="r1", alert="A", cases=(hostile,)), "ops")).encode())
    text = body["alerts"][0]["annotations"]["summary"]
    assert not set(text) & set("\x1b\x00\ud800\u202e")
    assert body["groupLabels"]["run"] == body["alerts"][0]["labels"]["run"] == text


@pytest.mark.parametrize(
    ("answer", "fault", "retry"),
    [
        (200, None, False),
        (204, None, False),
        (GARBAGE, None, False),
        (CLOSE, "connection", True),
        (500, "server error", True),
        (503, "server error", True),
        (400, "rejected", False),
        (404, "rejected", False),
        (408, "rejected", True),
        (425, "rejected", True),
        ((301, {"Location": "http://elsewhere/"}), "rejected", False),
        ((429, {"Retry-After": "7"}), "rate limited", True),
    ],
)
def test_what_an_answer_means(answer: Answer, fault: str | None, retry: bool) -> None:
    with consumer(answer) as ops:
        found = delivered(ops.url)
        check(ops.next())
    assert (found.fault, found.retry) == (fault, retry)
    assert found.after == (7.0 if fault == "rate limited" else 0.0)


def test_a_token_is_the_authorization_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPS_TOKEN", SECRET)

    async def deliver(url: str) -> Delivery:
        webhook = Webhook(settings.ReceiverSettings(name="ops", type="webhook", url=url, token_env="OPS_TOKEN"))
        try:
            return await webhook.deliver(message())
        finally:
            await webhook.close()

    with consumer() as ops:
        assert asyncio.run(deliver(ops.url)).fault is None
        ops.next()
        assert ops.authorizations == [f"Bearer {SECRET}"]
        monkeypatch.delenv("OPS_TOKEN")
        missing = asyncio.run(deliver(ops.url))
    assert (missing.fault, missing.retry) == ("settings", True)


def test_a_consumer_that_hangs_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    with consumer(HANG) as ops:
        found = delivered(ops.url, timeout=0.2)
    assert (found.fault, found.retry) == ("timeout", True)


def test_no_server_at_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = delivered(f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert (found.fault, found.retry, found.detail) == ("connection", True, "connection refused")
    assert delivered("http://no-such-host.invalid/").detail == "its host name is not known"


def test_a_server_that_speaks_no_tls_is_no_connection() -> None:
    with consumer() as ops:
        found = delivered(ops.url.replace("http:", "https:"))
    assert (found.fault, found.retry) == ("connection", True)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("120", 120), ("soon", 0), ("-5", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("1e9", 0), ("\u0661", 0),
     ("Wed, 21 Oct 2015 07:28:00 +99999999999999", 0)],
)  # fmt: skip
def test_retry_after_is_seconds_or_a_date_or_nothing(header: str, seconds: float) -> None:
    assert seconds_after(header) == seconds


def test_retry_after_as_a_date_lies_ahead() -> None:
    assert seconds_after("Fri, 31 Dec 2999 23:59:59 GMT") > 1e9
    assert verdict(503, "30").after == 30


def test_the_url_is_in_no_log_and_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    said = []
    with consumer(200, 500, (301, {"Location": f"http://h/{SECRET}"}), CLOSE) as ops:
        for url in [
            *[f"{ops.url}/{SECRET}"] * 4,
            f"http://127.0.0.1:1/{SECRET}",
            f"ftp://{SECRET}",
            f"http://[{SECRET}",
        ]:
            monkeypatch.setenv("OPS", url)

            async def deliver() -> Delivery:
                webhook = Webhook(settings.ReceiverSettings(name="ops", type="webhook", url_env="OPS"))
                try:
                    return await webhook.deliver(message())
                finally:
                    await webhook.close()

            said.append(asyncio.run(deliver()))
    assert [found.fault for found in said] == [
        None, "server error", "rejected", "connection", "connection", "settings", "settings"
    ]  # fmt: skip
    assert SECRET not in repr(said)
    assert SECRET not in caplog.text


def test_the_link_of_the_settings_is_in_the_payload() -> None:
    body = payload(
        Message(
            run="t", run_id="r", alert="A", cases=(case(),), origin=Origin(dashboard="https://g.example/d/x?run=r")
        ),
        "ops",
    )
    assert body["externalURL"] == "https://g.example"
    assert body["alerts"][0]["generatorURL"] == "https://g.example/d/x?run=r"
    assert payload(message(), "ops")["externalURL"] == ""


def test_links_host_and_user_are_annotations() -> None:
    annotations = payload(message(origin=ORIGIN), "ops")["alerts"][0]["annotations"]
    assert {name: annotations[name] for name in ("host", "user", "runbook_url", "page_url", "report_url")} == {
        "host": "node-7", "user": "ada", "runbook_url": "https://wiki.example/runbook#loss-spike",
        "page_url": "https://page.example/r1", "report_url": "https://files.example/r1.html",
    }  # fmt: skip
    assert payload(message(origin=ORIGIN), "ops")["alerts"][0]["generatorURL"] == "https://page.example/r1"


def test_the_example_in_the_docs_is_what_is_sent() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text()
    shown = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert json.loads(shown[1]) == payload(message(case(ranks=2)), "ops")


@pytest.mark.parametrize("seconds", [math.nan, -1e30, 1e30, math.inf])
def test_a_clock_that_is_far_out_still_gives_a_time(seconds: float) -> None:
    assert moment(seconds) in ("1970-01-01T00:00:00.000Z", "9999-12-31T23:59:59.000Z")


def test_an_answer_is_not_unpacked() -> None:
    """200 kB of gzip may unpack to 200 MB, which takes a second of the daemon's loop."""
    packed = gzip.compress(b"{}" * 1000)

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx2.Response(200, headers={"Content-Encoding": "gzip"}, stream=httpx2.ByteStream(packed))

    async def asked() -> tuple[Delivery, bytes]:
        poster = Poster(1.0, httpx2.MockTransport(answer))
        found = await poster.ask("http://127.0.0.1/", b"{}")
        await poster.close()
        return found

    delivery, body = asyncio.run(asked())
    assert delivery.fault is None
    assert body == packed
