"""Sends metrics, and spans of what has ended, to an OpenTelemetry collector at each interval (`[otlp]`)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from sentinel.config.otlp import INSTALL, OtlpSettings, Signal
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.errors import ConfigError
from sentinel.notify.entry import LONGEST_AFTER, pause
from sentinel.notify.periodic import Periodic, Request
from sentinel.store import History, Store

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from opentelemetry.proto.trace.v1.trace_pb2 import Span
    from prometheus_client.metrics_core import Metric

    from sentinel.daemon.frontend.run_spans import Progress

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""Seconds for a request, if neither settings nor environment set another: OpenTelemetry's default."""
FINISH_SECONDS = 5.0
"""Seconds for the last spans of a run that has ended."""


class _Requests(msgspec.Struct):
    """Counts and state of the requests of one signal."""

    sent: int = 0
    failed: int = 0
    trouble: str = ""
    """Why the last request did not arrive; empty if it did."""
    failures: int = 0
    """Consecutive failures up to now that may be tried again."""
    due: float = 0.0
    """When the collector may be asked again, by the monotonic clock."""


class Telemetry(Periodic[OtlpSettings]):
    """Sends metrics and spans to a collector.

    Metrics that it did not take are not sent again: the next ones have newer values. Spans are, by this daemon or, if
    the run goes on, by the next one.
    """

    def __init__(
        self,
        settings: OtlpSettings | None,
        collect: Callable[[], Iterator[Metric]],
        watches: Mapping[str, WatchedRun],
    ) -> None:
        """`collect` yields the metric families, each made on demand. `watches` is the daemon's live mapping."""
        super().__init__(settings)
        self._collect, self._watches = collect, watches
        self._began = time.time()
        self._requests: dict[Signal, _Requests] = {"metrics": _Requests(), "traces": _Requests()}
        self._sending = asyncio.Lock()
        """Held while spans are sent, so that each is sent once."""

    def status(self) -> dict[str, Any]:
        """Return the counts so far, and the last trouble, by signal; empty if the settings ask for none."""
        asked = self.settings.signals if self.settings is not None else ()
        found = {signal: self._requests[signal] for signal in asked}
        return {
            signal: {"sent": one.sent, "failed": one.failed, "trouble": one.trouble} for signal, one in found.items()
        }

    def replace(self, settings: OtlpSettings | None) -> None:
        for requests in self._requests.values():
            requests.due = 0.0  # it may be another collector
        super().replace(settings)

    async def send(self, settings: OtlpSettings) -> None:
        try:
            if self._is_due("metrics", settings):
                await self._send_metrics(settings)
            await self._send_spans(list(self._watches.values()), settings)
        except Exception:
            log.exception("a push to the OpenTelemetry collector is left out")

    async def finish(self, watches: Iterable[WatchedRun]) -> None:
        """Send the last spans of runs that are released. Never raises."""
        if self.settings is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINISH_SECONDS):
                    await self._send_spans(watches, self.settings, over=True)
                    await self.close()

    def _is_due(self, signal: Signal, settings: OtlpSettings) -> bool:
        return signal in settings.signals and time.monotonic() >= self._requests[signal].due

    async def _send_metrics(self, settings: OtlpSettings) -> None:
        # The import takes 0.1 s if there is no HTTP.
        await asyncio.to_thread(importlib.import_module, "sentinel.daemon.frontend.metrics")
        families = []
        for family in self._collect():
            families.append(family)
            await asyncio.sleep(0)  # with a thousand ranks a family takes milliseconds; the daemon serves in between
        await self._request(settings, "metrics", functools.partial(_encode_metrics, families, self._began))

    async def _send_spans(self, watches: Iterable[WatchedRun], settings: OtlpSettings, *, over: bool = False) -> None:
        async with self._sending:
            for watch in watches:
                if watch.store is not None and self._is_due("traces", settings):
                    try:
                        await self._send_run(watch.store, settings, over=over)
                    except (ConfigError, OSError) as error:  # its history cannot be read now
                        self._note("traces", f"run {watch.run.name}: {error}")

    async def _send_run(self, store: Store, settings: OtlpSettings, *, over: bool) -> None:
        """Send all spans that can be made by now."""
        progress = None
        while True:
            await asyncio.wrap_future(store.begin_flush())
            spans, more = await asyncio.to_thread(_make_spans, store, progress, over)
            if more == progress:
                return
            if spans and not await self._request(settings, "traces", functools.partial(_encode_spans, spans)):
                return
            progress = more
            store.records.mark_spans(msgspec.json.encode(progress).decode())

    async def _request(self, settings: OtlpSettings, signal: Signal, encode: Callable[[], Message]) -> bool:
        """Send once; return whether no other try is needed: it arrived, or never will."""
        requests = self._requests[signal]
        delivery = await self.post(functools.partial(_make_request, settings, signal, encode))
        self._note(signal, delivery.detail)
        requests.sent += delivery.fault is None
        requests.failed += delivery.fault is not None
        requests.failures = requests.failures + 1 if delivery.retry else 0
        if delivery.retry:
            requests.due = time.monotonic() + max(pause(requests.failures), min(delivery.after, LONGEST_AFTER))
        return not delivery.retry

    def _note(self, signal: Signal, trouble: str) -> None:
        former, self._requests[signal].trouble = self._requests[signal].trouble, trouble
        if trouble != former:
            log.warning("%s to the OpenTelemetry collector: %s", signal, trouble or "sent again")


@contextlib.contextmanager
def _needing_package() -> Iterator[None]:
    """Explain a failed import of the extra `otlp`. Such imports take 0.1 s, and belong on a thread.

    Raises ConfigError that says what to install.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"[otlp] needs the package {error.name}: {INSTALL}") from None


def _make_spans(store: Store, progress: Progress | None, over: bool) -> tuple[list[Span], Progress]:
    with _needing_package():
        from sentinel.daemon.frontend.run_spans import make_spans, read_progress
    with History(store.path) as history:
        return make_spans(history, progress or read_progress(history), time.time(), over=over)


def _encode_metrics(families: list[Metric], began: float) -> Message:
    from sentinel.otlp.metrics import encode_metrics

    return encode_metrics(families, began, time.time())


def _encode_spans(spans: list[Span]) -> Message:
    from sentinel.daemon.frontend.run_spans import encode_spans

    return encode_spans(spans)


def _make_request(settings: OtlpSettings, signal: Signal, encode: Callable[[], Message]) -> Request:
    with _needing_package():
        from sentinel.otlp.protocol import make_request

        message = encode()
    url, content, headers, timeout = make_request(settings, signal, message)
    return url, content, headers, settings.timeout or timeout or TIMEOUT_SECONDS
