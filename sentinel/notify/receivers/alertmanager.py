"""Alertmanager, API v2: send the alerts themselves, as Prometheus does.

Alerts are sent again each minute while they fire, with an end four minutes ahead (4 x the larger of evaluation interval
and resend delay, as Prometheus computes it): if Sentinel dies, the alert resolves itself. A silence does not change
that, or it would be announced as the end. Grouping, routes and inhibition are Alertmanager's, so nothing waits here.
"""

from __future__ import annotations

import json
import time
from typing import Any

from sentinel.config import settings as config
from sentinel.config.settings import Duration, Grouping
from sentinel.notify import Delivery, Message
from sentinel.notify.receivers.webhook import Webhook, alert, end_outgrown, moment

RESENT_SECONDS = 60.0
AHEAD_SECONDS = 4 * RESENT_SECONDS
PATH = "/api/v2/alerts"
_KEPT = ("labels", "annotations", "startsAt", "endsAt", "generatorURL")
"""What the API takes of an alert in the webhook's form."""


class Alertmanager(Webhook):
    """POSTs alerts to one Alertmanager. Each member of a cluster is a receiver of its own, as for Prometheus."""

    async def _post(self, message: Message, url: str, headers: dict[str, str]) -> Delivery:
        url = url.rstrip("/").removesuffix(PATH) + PATH
        return await self._poster.post(url, json.dumps(alerts(message, time.time())).encode(), headers)


def alerts(message: Message, now: float) -> list[dict[str, Any]]:
    """Return one alert per alert name, consequences apart: its cases have the same labels, which identify it."""
    newest = {(case.alert, case.id in message.quiet): case for case in message.cases}
    moved = {case.id for case in message.cases if case.problem_id not in ("", message.problem_id)}
    inhibits = max((one.level for (_, quiet), one in newest.items() if not quiet and one.id not in moved), default=0)
    found = []
    for (_, quiet), case in newest.items():
        body = alert(case, message)
        # The alert that inhibits the consequences lasts as long as they do.
        lasts = message.firing and not quiet and case.id not in moved and case.level == inhibits
        fires = case.state == "firing" or lasts
        # An end before the beginning is refused, and clocks may be set back.
        end = now + AHEAD_SECONDS if fires else max(min(case.resolved_time or now, now), case.time)
        found.append(body | {"endsAt": moment(end)})
    found += end_outgrown(message, found)
    return [{name: body[name] for name in _KEPT} for body in found]


KIND = config.ReceiverKind(
    make=Alertmanager,
    find_mistake=config.find_missing_address,
    edits=lambda _: True,
    tracks=True,
    grouping=Grouping(wait=Duration(0), interval=Duration(1), repeat=Duration(RESENT_SECONDS)),
)
