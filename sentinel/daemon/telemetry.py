"""What goes to an OpenTelemetry collector at each interval (`[otlp]`)."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sentinel.config.otlp import INSTALL, OtlpSettings, Signal
from sentinel.errors import ConfigError
from sentinel.notify.entry import LONGEST_AFTER, pause
from sentinel.notify.periodic import Periodic, Request

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""For a request, where neither settings nor environment say; OpenTelemetry's own."""


class _Push(Periodic[OtlpSettings]):
    """Requests of one signal, and how they went."""

    signal: Signal

    def __init__(self, settings: OtlpSettings | None) -> None:
        super().__init__(settings)
        self.sent = self.failed = 0
        self.trouble = ""
        """Why the last request did not arrive."""
        self._failures = 0
        """One after the other."""

    def status(self) -> dict[str, Any]:
        """How it went so far; empty where the settings do not ask for it."""
        if self.settings is None:
            return {}
        return {self.signal: {"sent": self.sent, "failed": self.failed, "trouble": self.trouble}}

    async def _request(self, settings: OtlpSettings, make: Callable[[], Message]) -> tuple[bool, float]:
        """Send what `make` makes, which is called on a thread. Whether that is done with: it arrived, or never will.
        And seconds that the collector is to be left alone for."""
        former = self.trouble
        delivery = await self.post(lambda: _make_request(settings, self.signal, make))
        self.trouble = delivery.detail
        if self.trouble != former:
            log.warning("%s to the OpenTelemetry collector: %s", self.signal, self.trouble or "sent again")
        if delivery.fault is None:
            self.sent, self._failures = self.sent + 1, 0
            return True, 0.0
        self.failed, self._failures = self.failed + 1, self._failures + 1
        return not delivery.retry, max(pause(self._failures), min(delivery.after, LONGEST_AFTER))


class MetricsPush(_Push):
    """What a collector did not take is not sent again: the next push has the newer values."""

    signal = "metrics"

    def __init__(self, settings: OtlpSettings | None, collect: Callable[[], Iterator[Metric]]) -> None:
        """`collect` yields the families, each made when it is asked for."""
        super().__init__(settings)
        self._collect = collect
        self._began = time.time()

    async def send(self, settings: OtlpSettings) -> float:
        await asyncio.to_thread(importlib.import_module, "sentinel.daemon.metrics")  # 0.1 s, where there is no HTTP
        families = []
        for family in self._collect():
            families.append(family)
            await asyncio.sleep(0)  # of a thousand ranks a family takes milliseconds, and the daemon serves in between

        def encode() -> Message:
            from sentinel.otlp.metrics import encode_metrics

            return encode_metrics(families, self._began, time.time())

        _, wait = await self._request(settings, encode)
        return wait


def _make_request(settings: OtlpSettings, signal: Signal, make: Callable[[], Message]) -> Request:
    try:
        from sentinel.otlp.protocol import make_request

        message = make()
    except ImportError as error:
        raise ConfigError(f"[otlp] needs the package {error.name}: {INSTALL}") from None
    url, content, headers, timeout = make_request(settings, signal, message)
    return url, content, headers, settings.timeout or timeout or TIMEOUT_SECONDS
