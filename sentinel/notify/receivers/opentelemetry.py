"""OpenTelemetry: send each change of an incident as a log record, by OTLP over HTTP (docs/opentelemetry.md)."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sentinel.config import settings as config
from sentinel.config.otlp import INSTALL
from sentinel.config.settings import Duration, Grouping
from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.notify import DELIVERED, Delivery, Message
from sentinel.notify.http import Poster
from sentinel.notify.receivers.webhook import alert

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

SEVERITIES = {"info": 9, "warning": 13, "critical": 18}
"""Severity numbers INFO, WARN and ERROR2; OpenTelemetry's data model maps syslog's critical to ERROR2."""
EVENT = "sentinel.incident"


class OpenTelemetry:
    """POSTs log records to a collector."""

    def __init__(self, settings: config.ReceiverSettings) -> None:
        """Raises ImportError where the protocol's package is not installed."""
        self._protocol = importlib.import_module("sentinel.otlp.protocol")
        self._settings, self._poster = settings, Poster(settings.timeout)

    async def deliver(self, message: Message) -> Delivery:
        """Try to deliver once."""
        news = [case for case in message.cases if case.id not in message.unchanged]
        if not news:  # the incidents go on unchanged
            return DELIVERED
        try:
            request = encode_logs(message, news, time.time())
            url, content, headers, timeout = self._protocol.make_request(self._settings, "logs", request)
        except ConfigError as error:
            return Delivery(fault="settings", detail=str(error), retry=True)
        try:
            async with asyncio.timeout(timeout):
                return await self._poster.post(url, content, headers)
        except TimeoutError:
            return Delivery(fault="timeout", detail=f"no answer within {timeout:g} s", retry=True)

    async def close(self) -> None:
        """Close the client."""
        await self._poster.close()


def encode_logs(message: Message, cases: Iterable[Case], now: float) -> ExportLogsServiceRequest:
    """Return a request to /v1/logs with these cases of a message. Labels and annotations are those of a webhook, as
    attributes `sentinel.NAME`."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    from sentinel.otlp.protocol import RANK, SCOPE, Value, make_attributes, make_resource, nanoseconds, trace_id

    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add(resource=make_resource()).scope_logs.add(scope=SCOPE)
    for case in cases:
        texts = alert(case, message)
        named = texts["labels"] | texts["annotations"] | {"state": case.state}
        ranks = [member.name for member in case.members if member.scope == "rank"]
        attributes: dict[str, Value] = {f"sentinel.{name}": text for name, text in named.items()}
        if len(ranks) == 1:
            attributes[RANK] = int(ranks[0])
        scope.log_records.add(
            time_unix_nano=nanoseconds(case.time if case.state == "firing" else case.resolved_time or now),
            observed_time_unix_nano=nanoseconds(now),
            trace_id=trace_id(message.run_id),
            severity_number=SEVERITIES[case.severity],
            severity_text=case.severity,
            event_name=EVENT,
            body=AnyValue(string_value=named.get("summary", case.alert)),
            attributes=make_attributes(attributes),
        )
    return request


KIND = config.ReceiverKind(
    make=OpenTelemetry,
    edits=lambda _: True,
    tracks=True,
    grouping=Grouping(wait=Duration(0), interval=Duration(1), repeat=Duration(3650 * 86400)),
    install=INSTALL,
)
"""`repeat` is ten years, so that an incident that goes on is not recorded again."""
