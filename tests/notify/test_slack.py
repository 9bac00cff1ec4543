"""Slack: the messages it gets, within its limits, and the meaning of its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import msgspec
import pytest

from sentinel.config import settings as config
from sentinel.config.settings import Duration, Grouping
from sentinel.notify import Delivery, Message, Origin, Route
from sentinel.notify.limiter import Limiter
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers import slack
from tests.notify import hostile
from tests.notify.cases import ORIGIN, case
from tests.notify.test_pipeline import until
from tests.notify.vendors import BOT_TOKEN, HOOK_PATH, Allowance, Reply, Slack, serving, slack_message


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slack]:
    vendor = Slack()
    with serving(vendor):
        monkeypatch.setenv("SLACK_HOOK", vendor.url + HOOK_PATH)
        monkeypatch.setenv("SLACK_TOKEN", BOT_TOKEN)
        yield vendor


def bot(server: Slack, channel: str = "#training") -> config.ReceiverSettings:
    return config.ReceiverSettings(
        name="team", type="slack", token_env="SLACK_TOKEN", url=f"{server.url}/api", channel=channel
    )


HOOK = config.ReceiverSettings(name="team", type="slack", url_env="SLACK_HOOK", timeout=Duration(5))


def message(*cases: object, **more: object) -> Message:
    return Message(run="train", run_id="r1", alert="LossSpike", cases=cases or (case(ranks=64),), **more)  # type: ignore[arg-type]


def told(settings: config.ReceiverSettings, *messages: Message) -> list[Delivery]:
    async def deliver() -> list[Delivery]:
        receiver = slack.Slack(settings)
        try:
            return [await receiver.deliver(one) for one in messages]
        finally:
            await receiver.close()

    return asyncio.run(deliver())


def text_of(body: dict[str, object]) -> str:
    return json.dumps(body["blocks"], ensure_ascii=False)


def test_a_message_says_what_where_since_why_and_what_to_do() -> None:
    body = slack_message(
        json.dumps(slack.payload(message(origin=Origin(dashboard="https://grafana.example/d/run")))).encode()
    )
    for words in (
        "LossSpike  train", "loss 6.861 by step 457", "*where*  rank 0, 1, 2 and 61 more", "*since*  step 456",
        "*why*  the batch of step 456 (confidence: medium)", "*do*  look at it", "*severity*  critical",
        "sentinel incidents show 0.1 --run r1", "docs/runbook.md#loss-spike", "https://grafana.example/d/run",
    ):  # fmt: skip
        assert words in text_of(body), words
    assert body["text"].endswith("LossSpike in train: " + case().summary)


def test_the_links_of_the_settings_are_links_and_host_and_user_are_named() -> None:
    body = slack_message(json.dumps(slack.payload(message(origin=ORIGIN))).encode())
    *_, foot, links = [block["text"]["text"] for block in body["blocks"]]
    assert links == (
        "<https://wiki.example/runbook#loss-spike|runbook>  <https://page.example/r1|page>  "
        "<https://files.example/r1.html|report>"
    )
    assert "*host*  node-7\n*user*  ada\n" in foot
    assert "docs/runbook.md" not in foot


def test_an_incoming_webhook_gets_a_follow_up_when_it_is_over(server: Slack) -> None:
    first, over = told(HOOK, message(), message(case(state="resolved")))
    assert (first, over) == (Delivery(), Delivery())
    assert "over" not in server.next()["blocks"][0]["text"]["text"]
    follow_up = server.next()
    assert follow_up["blocks"][0]["text"]["text"].endswith("LossSpike  train: over")
    assert "(over at step 500)" in text_of(follow_up)


def test_a_bot_has_one_message_a_group_edits_it_and_answers_in_its_thread_when_it_is_over(server: Slack) -> None:
    (first,) = told(bot(server), message(case(ranks=1)))
    (more,) = told(bot(server), message(case(ranks=64), reference=first.reference))
    (over,) = told(bot(server), message(case(state="resolved"), reference=more.reference))
    assert first.reference == more.reference == "C0123456789 1700000000.000000"
    assert over == Delivery()
    posted, edited, ended, reply = (server.next() for _ in range(4))
    methods = [one["method"] for one in (posted, edited, ended, reply)]
    assert methods == ["chat.postMessage", "chat.update", "chat.update", "chat.postMessage"]
    assert "61 more" in text_of(edited)
    assert (reply["thread_ts"], reply["reply_broadcast"]) == (edited["ts"], False)
    assert "over at step 500" in reply["text"]
    (posted,) = told(bot(server), message(case("0.2"), reference=over.reference))
    assert posted.reference != first.reference


def test_a_bot_says_so_in_the_channel_when_it_goes_on_for_long(server: Slack) -> None:
    (first,) = told(bot(server), message())
    (again,) = told(bot(server), message(reference=first.reference, repeated=True))
    assert again.reference == first.reference
    *_, reply = server.all()
    assert reply["reply_broadcast"] is True


def test_a_deleted_message_is_posted_again(server: Slack) -> None:
    (first,) = told(bot(server), message())
    server.messages.clear()
    (posted,) = told(bot(server), message(reference=first.reference))
    assert posted.fault is None
    assert posted.reference
    assert [one["method"] for one in server.all()] == ["chat.postMessage", "chat.postMessage"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", ["hook", "bot"])
def test_200_incidents_with_hostile_texts_are_all_accepted(server: Slack, settings: str) -> None:
    named = HOOK if settings == "hook" else bot(server)
    messages = [
        Message(
            run=one.run, run_id="r1", alert=one.alert, cases=(one,), origin=Origin(dashboard="https://h/" + "x" * 3000)
        )
        for one in hostile.cases(200)
    ]
    messages.append(message(*hostile.cases(60)))
    found = told(named, *messages)
    assert server.refused == []
    assert {delivery.fault for delivery in found} == {None}
    assert len(server.all()) == 201


def test_what_is_long_is_cut_and_never_left_out() -> None:
    long = case(ranks=64)
    long.summary, long.done = "s" * 20_000, tuple("d" * 20_000 for _ in range(60))
    body = slack.payload(message(*[long] * 30))
    sections = [block["text"]["text"] for block in body["blocks"] if block["type"] == "section"]
    assert len(sections) == slack.SHOWN_CASES + 1
    assert all("sss" in section and "*do*  look at it" in section for section in sections[:-1])
    assert "and 22 earlier ones" in sections[-1]


def test_slacks_own_models_find_nothing_wrong_either() -> None:
    blocks = pytest.importorskip("slack_sdk.models.blocks", reason="slack_sdk is not installed (pip install slack_sdk)")
    for one in hostile.cases(50):
        body = slack.payload(Message(run=one.run, run_id="r1", alert=one.alert, cases=(one,)))
        for block in blocks.Block.parse_all(body["blocks"]):
            block.validate_json()


@pytest.mark.parametrize(
    ("answer", "fault", "retry", "said"),
    [
        ((429, {"Retry-After": "30"}, b"rate_limited"), "rate limited", True, "429"),
        ((400, {}, b"invalid_blocks"), "rejected", False, "it answers 400"),
        ((403, {}, b"action_prohibited"), "rejected", False, "it answers 403"),
        ((410, {}, b"channel_is_archived"), "rejected", False, "it answers 410"),
        ((500, {}, b"rollup_error"), "server error", True, "it answers 500"),
    ],
)
def test_what_a_webhooks_answer_means(server: Slack, answer: Reply, fault: str, retry: bool, said: str) -> None:
    server.answers.append(answer)
    (found,) = told(HOOK, message())
    assert (found.fault, found.retry, found.after) == (fault, retry, 30.0 if fault == "rate limited" else 0.0)
    assert said in found.detail


@pytest.mark.parametrize(
    ("error", "fault", "retry", "said"),
    [
        ("invalid_auth", "settings", True, "put the bot's token"),
        ("not_in_channel", "settings", True, "invite it"),
        ("ratelimited", "rate limited", True, "ratelimited"),
        ("internal_error", "server error", True, "internal_error"),
        ("msg_too_long", "rejected", False, "it refuses the message"),
        (f"echo {BOT_TOKEN}", "rejected", False, "it refuses the message"),
    ],
)
def test_what_the_web_apis_answer_means(server: Slack, error: str, fault: str, retry: bool, said: str) -> None:
    server.answers.append((200, {}, json.dumps({"ok": False, "error": error}).encode()))
    (found,) = told(bot(server), message())
    assert (found.fault, found.retry) == (fault, retry)
    assert said in found.detail
    assert BOT_TOKEN not in repr(found)


@pytest.mark.parametrize("body", [b"", b"\xff", b"<html>", b"[1]", b'{"ok": "yes"}', b"9" * 1_000_000])
def test_a_200_that_is_not_slacks_is_no_delivery(server: Slack, body: bytes) -> None:
    server.answers.append((200, {}, body))
    (found,) = told(bot(server), message())
    assert (found.fault, found.retry) == ("server error", True)


def test_an_unknown_channel_and_a_missing_token_are_reported_and_tried_again(
    server: Slack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unknown,) = told(bot(server, "#elsewhere"), message())
    assert (unknown.fault, unknown.retry) == ("settings", True)
    monkeypatch.delenv("SLACK_TOKEN")
    (missing,) = told(bot(server), message())
    assert missing == Delivery(
        fault="settings",
        detail="environment variable SLACK_TOKEN is empty or not set; put the token there",
        retry=True,
    )


@pytest.mark.parametrize(
    "text", ["&" * 100, "<>&" * 40, "a&" * 99, "\U0001f525&" * 50], ids=["amp", "all", "a", "fire"]
)
@pytest.mark.parametrize("limit", range(20, 40))
def test_no_entity_is_cut_in_two(text: str, limit: int) -> None:
    slack_message(msgspec.json.encode({"text": slack.escape_markup(text, limit)}))
    assert len(slack.escape_markup(text, limit).encode("utf-16-le")) <= 2 * limit


@pytest.mark.slow
def test_a_vendor_that_enforces_its_rate_gets_all_of_them_once(server: Slack) -> None:
    """The server allows twenty a second, and answers further ones by 429 with Retry-After."""
    server.allowance = Allowance(20, 1.0)
    at_once = Grouping(wait=Duration(0), interval=Duration(0), repeat=Duration(3600))

    async def scenario() -> None:
        route = Route("team", slack.Slack(HOOK), lambda _: True, 5.0, at_once, Limiter())
        pipeline = Pipeline("train", "r1", [route], outbox=Outbox(None))
        pipeline.start()
        for one in hostile.cases(60, wired=True):
            pipeline.put(one)
        await until(lambda: pipeline.pending == 0)
        await pipeline.close()
        await route.receiver.close()

    asyncio.run(scenario())
    assert server.refused == []
    assert server.allowance.refused > 0
    assert len({body["text"] for body in server.all()}) == 60
