"""A webhook in the format of Alertmanager, version 4: programs that read its notifications can read Sentinel's.

prometheus.io/docs/alerting/latest/configuration/#webhook_config. Labels identify the alert and stay the same from the
first message to the last; numbers are in the annotations.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sentinel.config import settings as config
from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.notify import Delivery, Message, wording
from sentinel.notify.http import Poster
from sentinel.text import drop_controls, join_names

SHOWN_MEMBERS = 20
NEVER = "0001-01-01T00:00:00Z"
"""`endsAt` of an alert that fires: the zero value of Go's time."""
LATEST = 253402300799.0
"""The last second of the year 9999, in unix seconds."""


class Webhook:
    """POSTs each message to a URL."""

    def __init__(self, settings: config.ReceiverSettings) -> None:
        self._settings, self._poster = settings, Poster(settings.timeout)

    async def deliver(self, message: Message) -> Delivery:
        """Try to deliver once."""
        try:
            url, headers = self._settings.address(), self._settings.authorization()
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        return await self._post(message, url, headers)

    async def _post(self, message: Message, url: str, headers: dict[str, str]) -> Delivery:
        return await self._poster.post(url, json.dumps(payload(message, self._settings.name)).encode(), headers)

    async def close(self) -> None:
        """Close the client."""
        await self._poster.close()


def payload(message: Message, receiver: str) -> dict[str, Any]:
    """Return the body of a message."""
    alerts = [alert(case, message) for case in message.cases]
    alerts = [*end_outgrown(message, alerts), *alerts]
    for label, text in wording.notes(message):
        alerts[-1]["annotations"][label] = drop_controls(text)
    known_by = {"problem": message.problem_id} if message.problem_id else {"alertname": drop_controls(message.alert)}
    group = known_by | {"run": drop_controls(message.run), "run_id": drop_controls(message.run_id)}
    return {
        "receiver": receiver,
        "status": "firing" if message.firing else "resolved",
        "alerts": alerts,
        "groupLabels": group,
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": message.origin.link and "{0.scheme}://{0.netloc}".format(urlsplit(message.origin.link)),
        "version": "4",
        "groupKey": "{}:{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in group.items()) + "}",
        "truncatedAlerts": 0,
    }


def alert(case: Case, message: Message) -> dict[str, Any]:
    """Return one alert of a message in Alertmanager's form."""
    labels = {"alertname": case.alert, "run": case.run, "run_id": message.run_id, "severity": case.severity}
    labels |= {"problem": message.problem_id} if message.problem_id else {}
    labels |= {"consequence": "true"} if case.id in message.quiet else {}
    labels = {name: drop_controls(value) for name, value in labels.items()}
    firing = case.state == "firing"
    return {
        "status": "firing" if firing else "resolved",
        "labels": labels,
        "annotations": _annotations(case, message),
        "startsAt": moment(case.time),
        "endsAt": NEVER if firing else moment(case.resolved_time or case.time),
        "generatorURL": message.origin.link,
        "fingerprint": fingerprint(labels),
    }


def end_outgrown(message: Message, alerts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ends of the alerts as which cases were sent before they became more severe: another severity is
    another label, and so another alert. `alerts`: those of the message, which go on."""
    found = []
    for case in message.cases:
        if (was := message.outgrown.get(case.id)) is not None:
            ended = {"severity": was.severity, "state": "resolved", "resolved_time": max(was.time, case.time)}
            quiet = message.quiet | {case.id} if was.quiet else message.quiet - {case.id}
            former = msgspec.structs.replace(message, quiet=quiet)
            found.append(alert(msgspec.structs.replace(case, **ended), former))
    return [one for one in found if one["labels"] not in [going_on["labels"] for going_on in alerts]]


def _annotations(case: Case, message: Message) -> dict[str, str]:
    diagnosis = case.diagnosis
    members = dict.fromkeys(f"{member.scope} {member.name}" for member in case.members if member.scope != "run")
    known = diagnosis.confidence != "none"
    texts = {
        "summary": case.summary,
        "description": f"{diagnosis.cause} (confidence: {diagnosis.confidence})" if known else "",
        "remedy": diagnosis.remedy,
        "done": "; ".join(case.done),
        "state": case.state,
        "members": join_names(list(members), SHOWN_MEMBERS),
        "nodes": join_names([str(node) for node in wording.list_nodes(case)], SHOWN_MEMBERS),
        "first_step": str(case.first_step),
        "step": str(case.step),
        "resolved_step": "" if case.resolved_step is None else str(case.resolved_step),
        "incident": case.id,
        "parent": case.parent,
        "runbook": f"docs/runbook.md#{case.runbook}" if case.runbook else "",
        "runbook_url": message.origin.link_section(case.runbook),
        **dict(wording.place(message)),
        **{f"{label}_url": link for label, link in wording.links(message)},
    }
    return {name: drop_controls(text) for name, text in texts.items() if text}


def _common(maps: list[dict[str, str]]) -> dict[str, str]:
    """Return the entries that all of them have."""
    return {name: value for name, value in maps[0].items() if all(other.get(name) == value for other in maps[1:])}


def moment(seconds: float) -> str:
    """Return unix seconds as RFC 3339; the nearest time that can be written, where a rank's clock is far off."""
    seconds = 0.0 if math.isnan(seconds) else min(max(seconds, 0.0), LATEST)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def fingerprint(labels: dict[str, str]) -> str:
    """Return the hash of a label set as Prometheus computes it (64-bit FNV-1a): an alert has the same one in both."""
    value = 0xCBF29CE484222325
    for name in sorted(labels):
        for byte in name.encode() + b"\xff" + labels[name].encode() + b"\xff":
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


KIND = config.ReceiverKind(make=Webhook, find_mistake=config.find_missing_address, edits=lambda _: True)
