"""Slack: post one message per group. A bot edits it as the group changes, and replies in its thread when the group is
over, escalates or goes on for long; an incoming webhook can do neither, and posts a message each time.

Limits: docs.slack.dev/reference/block-kit/blocks. Escaping: docs.slack.dev/messaging/formatting-message-text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.config import settings as config
from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.notify import Delivery, Fault, Message, wording
from sentinel.notify.http import Poster

API = "https://slack.com/api"
HEADER, SECTION = 150, 3000
"""Most characters of a header block, and of a section's text."""
TOTAL = 12_000
"""Most characters of all blocks: above some 13,000 Slack answers msg_blocks_too_long, undocumented (bolt-js#2509)."""
LINKS = 2000
"""Most characters of the line of links."""
TEXT = 1000
"""Most characters of the notification; longer ones are cut on a phone."""
LONGEST = (2000, 1000, 500, 250, 120, 60, 30)
"""Most characters of one row, tried in turn until all rows fit."""
SHOWN_CASES, SHOWN_ROWS = 8, 12

LATER = frozenset({"fatal_error", "internal_error", "ratelimited", "request_timeout", "service_unavailable"})
LOST = frozenset({"cant_update_message", "edit_window_closed", "message_not_found", "thread_not_found"})
"""Errors that mean that the message to be edited is gone, or can no longer be edited: it is posted again."""
FIXES = {
    "account_inactive": "its token belongs to an account that is gone; make a new one",
    "channel_not_found": "its channel is not known to the bot; check channel, and invite the bot to it",
    "invalid_auth": "its token is not valid; put the bot's token (xoxb-...) there",
    "is_archived": "its channel is archived; name another",
    "missing_scope": "its token lacks a scope; give the bot chat:write",
    "not_authed": "its token is not valid; put the bot's token (xoxb-...) there",
    "not_in_channel": "the bot is not in its channel; invite it",
    "token_expired": "its token has expired; make a new one",
    "token_revoked": "its token was revoked; make a new one",
}
"""Slack's error that a person can fix -> our words for it. Slack's other words are not repeated."""

_MARKS = {"critical": "\U0001f534", "warning": "\U0001f7e1", "info": "\U0001f535", "": "\U0001f7e2"}
_BARE = {"unfurl_links": False, "unfurl_media": False}
"""Options against previews of pages that a run's texts happen to name."""
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def find_mistake(settings: config.ReceiverSettings) -> str:
    """Return what a receiver's settings lack, or have too much of; empty: nothing."""
    if not settings.has_address and not settings.has_token:
        return "slack needs url_env or url_file (a webhook), or token_env or token_file (a bot) and channel"
    if settings.has_token and not settings.channel:
        return 'slack with a bot\'s token needs a channel: channel = "#training", or its id'
    if settings.channel and not settings.has_token:
        return "slack with an incoming webhook has the webhook's channel; leave out channel, or name a bot's token"
    return ""


class Slack:
    """POSTs blocks to an incoming webhook, or to the Web API with a bot's token."""

    def __init__(self, settings: config.ReceiverSettings) -> None:
        self._settings, self._poster = settings, Poster(settings.timeout)

    async def deliver(self, message: Message) -> Delivery:
        """Try to deliver once."""
        try:
            headers = self._settings.authorization()
            url = self._settings.address() if self._settings.has_address or not headers else API
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        if not headers:
            return await self._poster.post(url, json.dumps(payload(message) | _BARE).encode())
        return await self._send_message(message, _Call(self._poster, url.rstrip("/"), headers))

    async def close(self) -> None:
        """Close the client."""
        await self._poster.close()

    async def _send_message(self, message: Message, call: _Call) -> Delivery:
        body = payload(message)
        channel, _, ts = message.reference.partition(" ")
        if ts:
            delivery = await call("chat.update", {"channel": channel, "ts": ts, **body})
            loud = message.repeated or message.escalated
            if delivery.fault is None and (loud or not message.firing):
                # An edit causes no notification.
                reply = {"thread_ts": ts, "reply_broadcast": loud, "text": body["text"]}
                delivery = await call("chat.postMessage", {"channel": channel, **reply})
            if delivery.detail not in LOST:
                return msgspec.structs.replace(delivery, reference=message.reference if message.firing else "")
        delivery = await call("chat.postMessage", {"channel": self._settings.channel, **body, **_BARE})
        return delivery if message.firing else msgspec.structs.replace(delivery, reference="")


class _Call:
    """Calls methods of the Web API, which answers 200 and reports errors in the body."""

    def __init__(self, poster: Poster, api: str, headers: dict[str, str]) -> None:
        self._poster, self._api, self._headers = poster, api, headers

    async def __call__(self, method: str, body: dict[str, Any]) -> Delivery:
        content = json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json; charset=utf-8"}
        delivery, answer = await self._poster.ask(f"{self._api}/{method}", content, headers)
        return judge_answer(answer) if delivery.fault is None else delivery


class _Answer(msgspec.Struct):
    ok: bool
    error: str = ""
    channel: str = ""
    ts: str = ""


def judge_answer(answer: bytes) -> Delivery:
    """Return what the body of a 200 means. A fault's `detail` is one of our sentences, or a word of `LOST`."""
    try:
        found = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Delivery(fault="server error", detail="its answer is not that of Slack", retry=True)
    if found.ok:
        return Delivery(reference=f"{found.channel} {found.ts}")
    if found.error in LOST:
        return Delivery(fault="rejected", detail=found.error)
    if found.error in LATER:
        fault: Fault = "rate limited" if found.error == "ratelimited" else "server error"
        return Delivery(fault=fault, detail=f"it answers {found.error}", retry=True)
    if found.error in FIXES:
        return Delivery(fault="settings", detail=FIXES[found.error], retry=True)
    return Delivery(fault="rejected", detail="it refuses the message")


def payload(message: Message) -> dict[str, Any]:
    """Return text and blocks of a message."""
    leading = message.leading
    mark = _MARKS.get(leading.severity if message.firing else "", _MARKS["info"])
    ended = "" if message.firing else ": over"
    title = f"{mark} {leading.alert}  {message.run}{ended}"
    text = f"{mark} {leading.severity} {leading.alert} in {message.run}: {_what(leading)}"
    shown = message.cases[-SHOWN_CASES:]
    room = min(SECTION, (TOTAL - HEADER - SECTION - LINKS) // len(shown))
    links = _list_links(message)
    return {
        "text": escape_markup(text, TEXT),
        "blocks": [
            {
                "type": "header",
                "text": {"type": "plain_text", "text": _fill_text(wording.cut(title, HEADER)), "emoji": False},
            },
            *(_section(_list_rows(case, message), room) for case in shown),
            _section(_foot(message, len(message.cases) - len(shown)), SECTION),
            *([_mark_up(links)] if links else []),
        ],
    }


def escape_markup(text: str, limit: int) -> str:
    """Return plain text as Slack's markup, in at most `limit` characters, no entity cut in two."""
    whole = wording.cut(text, limit).translate(_ENTITIES)
    short = wording.cut(whole, limit)
    return _fill_text(short if short == whole else re.sub(r"&[a-z]{0,3}\u2026$", "\u2026", short))


def _list_rows(case: Case, message: Message) -> Sequence[tuple[str, str]]:
    if case.id in message.quiet and case is not message.leading:
        return [("with it", wording.describe_member(case))]
    return [("", _what(case)), *wording.rows(case)]


def _what(case: Case) -> str:
    over = "" if case.state == "firing" else f" ({wording.end(case, undone=case.state == 'rolled_back')})"
    return case.summary + over


def _foot(message: Message, hidden: int) -> Sequence[tuple[str, str]]:
    leading = message.leading
    more = f"{wording.more(leading)}" + (f" (and {hidden} earlier ones)" if hidden else "")
    found = [("severity", leading.severity), ("run", message.run_id), *wording.place(message), ("more", more)]
    named = "" if message.origin.runbook else wording.runbook(leading, message)
    found += [("runbook", named), *wording.notes(message)]
    return [(label, text) for label, text in found if text]


def _list_links(message: Message) -> str:
    """Return the settings' links, as many as fit: the only links in a message."""
    runbook = message.origin.link_section(message.leading.runbook)
    text = ""
    for label, link in [*([("runbook", runbook)] if runbook else []), *wording.links(message)]:
        one = f"<{link.translate(_ENTITIES)}|{label}>"
        if len(text) + len(one) < LINKS:
            text = f"{text}  {one}" if text else one
    return text


def _section(rows: Sequence[tuple[str, str]], room: int) -> dict[str, Any]:
    return _mark_up(next(filter(None, (_fitting(rows, room, longest) for longest in LONGEST)), ""))


def _mark_up(text: str) -> dict[str, Any]:
    """Return a section block. `verbatim`: a name that looks like a link, a channel or a person is not made one."""
    return {"type": "section", "text": {"type": "mrkdwn", "text": _fill_text(text), "verbatim": True}}


def _fitting(rows: Sequence[tuple[str, str]], room: int, longest: int) -> str:
    """Return the rows, none longer than `longest`; empty where they do not fit, so that long rows are cut first."""
    lines = [
        f"*{label}*  {escape_markup(text, longest)}" if label else escape_markup(text, longest) for label, text in rows
    ]
    whole = "\n".join(lines[:SHOWN_ROWS])
    return whole if whole == wording.cut(whole, room) else ""


def _fill_text(text: str) -> str:
    """Return a text that is not blank, because Slack refuses blank ones."""
    return text if text.strip() else "-"


KIND = config.ReceiverKind(make=Slack, find_mistake=find_mistake, limit=(1, 1.0), edits=lambda named: named.has_token)
"""The limit is one message per second and channel: docs.slack.dev/apis/web-api/rate-limits."""
