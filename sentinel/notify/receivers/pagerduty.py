"""PagerDuty, Events API v2: a group triggers and resolves one incident; a rollback is a change event, without a page.

developer.pagerduty.com/docs/events-api-v2-overview, .../trigger-events and .../send-change-event.
"""

from __future__ import annotations

import json
from typing import Any

from sentinel._version import __version__
from sentinel.config import settings as config
from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.notify import DELIVERED, Delivery, Message, wording
from sentinel.notify.http import Poster
from sentinel.notify.receivers.webhook import moment
from sentinel.text import join_names

EVENTS = "https://events.pagerduty.com"
"""Default host; accounts in Europe use https://events.eu.pagerduty.com."""
SUMMARY = 1024
"""Most characters of payload.summary. The whole event may have 512 kB; `DETAIL` keeps it far below that."""
DETAIL = 4000
"""Most characters of any other text."""
LINKED = 2000
SHOWN_OTHERS = 5
SEVERITIES = {"critical": "critical", "warning": "warning", "info": "info"}


def find_mistake(settings: config.ReceiverSettings) -> str:
    """Return what a receiver's settings lack; empty: nothing."""
    if settings.has_token:
        return ""
    return "pagerduty needs the routing key of an Events API v2 integration: token_env or token_file"


class PagerDuty:
    """POSTs events. The routing key is the receiver's token."""

    def __init__(self, settings: config.ReceiverSettings) -> None:
        self._settings, self._poster = settings, Poster(settings.timeout)

    async def deliver(self, message: Message) -> Delivery:
        """Try to deliver once. A message sent twice, because its second half failed, finds its incident by the key."""
        try:
            key = self._settings.token()
            host = self._settings.address().rstrip("/") if self._settings.has_address else EVENTS
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        delivery = await self._send(f"{host}/v2/enqueue", event(message, key))
        for case in message.cases:
            if delivery.fault is None and case.state == "rolled_back" and case.id not in message.unchanged:
                delivery = await self._send(f"{host}/v2/change/enqueue", change(message, case, key))
        return delivery if delivery.fault else DELIVERED

    async def close(self) -> None:
        """Close the client."""
        await self._poster.close()

    async def _send(self, url: str, body: dict[str, Any]) -> Delivery:
        return await self._poster.post(url, json.dumps(body).encode())


def event(message: Message, routing_key: str) -> dict[str, Any]:
    """Return the event: `trigger` while any case of the group fires, else `resolve`."""
    case = message.leading
    base = {
        "routing_key": routing_key,
        "event_action": "trigger" if message.firing else "resolve",
        "dedup_key": message.key,
    }
    if not message.firing:
        return base
    return base | {
        "client": "Sentinel",
        **({"client_url": message.origin.link[:LINKED]} if message.origin.link else {}),
        "links": _links(message),
        "payload": {
            "summary": _summary(f"{case.alert} in {message.run}: {case.summary}"),
            "source": _summary(message.run),
            "severity": SEVERITIES.get(case.severity, "error"),
            "timestamp": moment(case.time),
            "component": _summary(wording.where(case)),
            "group": _summary(message.run_id),
            "class": _summary(case.alert),
            "custom_details": _details(message, case),
        },
    }


def change(message: Message, case: Case, routing_key: str) -> dict[str, Any]:
    """Return the change event that a run was rolled back."""
    return {
        "routing_key": routing_key,
        "payload": {
            "summary": _summary(f"{message.run} was rolled back: {wording.end(case, undone=True)}"),
            "source": _summary(message.run),
            "timestamp": moment(case.resolved_time or case.time),
            "custom_details": _details(message, case),
        },
        "links": _links(message),
    }


def _details(message: Message, case: Case) -> dict[str, str]:
    """Return the alert's texts, and the other incidents of the group."""
    found = {"what": case.summary, "run": message.run, "run_id": message.run_id, "step": str(case.step)}
    for label, text in wording.rows(case):
        found[label] = f"{found[label]}; {text}" if label in found else text
    if others := [wording.describe_member(other) for other in message.cases if other is not case]:
        found["problem"] = join_names(others, SHOWN_OTHERS)
    found |= {"more": wording.more(case), **dict(wording.notes(message)), **dict(wording.place(message))}
    found["sentinel"] = __version__
    if case.runbook:
        found["runbook"] = wording.runbook(case, message)
    return {label: wording.cut(text, DETAIL) for label, text in found.items()}


def _links(message: Message) -> list[dict[str, str]]:
    runbook = message.origin.link_section(message.leading.runbook)
    found = [*wording.links(message), *([("runbook", runbook)] if runbook else [])]
    return [{"href": link[:LINKED], "text": label} for label, link in found]


def _summary(text: str) -> str:
    """Return a text as one line, because it is read out on the phone."""
    return wording.cut(" ".join(text.split()), SUMMARY) or "-"


KIND = config.ReceiverKind(make=PagerDuty, find_mistake=find_mistake, limit=(100, 60.0), edits=lambda _: True)
"""The limit is 100 events a minute: from about 120 per minute and key on PagerDuty answers 429."""
