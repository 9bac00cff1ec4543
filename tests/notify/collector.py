"""An OpenTelemetry collector that takes only what the protocol's own definitions can parse."""

from __future__ import annotations

import gzip
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.notify.vendors import Reply, Vendor

KINDS = {
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
    "/v1/traces": ExportTraceServiceRequest,
}


class Collector(Vendor):
    """A collector. `taken` has each accepted request, as its signal and the protocol's message."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[dict[str, str]] = []

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        self.headers.append(headers)
        if path not in KINDS:
            return 404, {}, b""
        try:
            assert headers["content-type"] == "application/x-protobuf"
            request = KINDS[path].FromString(gzip.decompress(body) if "content-encoding" in headers else body)
            _check(request)
        except Exception as error:
            self.refused.append(repr(error))
            return 400, {}, b""
        self.taken.put({"signal": path.rpartition("/")[2], "request": request})
        return 200, {"Content-Type": "application/x-protobuf"}, b""

    def take(self, signal: str) -> Any:
        """Wait for the next request of a signal, skipping others, and return it."""
        while True:
            found = self.next()
            if found["signal"] == signal:
                return found["request"]


def list_records(request: Any) -> list[Any]:
    """Return the log records of a request to /v1/logs."""
    return [
        record for resource in request.resource_logs for scope in resource.scope_logs for record in scope.log_records
    ]


def list_spans(request: Any) -> list[Any]:
    """Return the spans of a request to /v1/traces."""
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def list_metrics(request: Any) -> list[Any]:
    """Return the metrics of a request to /v1/metrics."""
    return [
        metric for resource in request.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
    ]


def read_attributes(pairs: Any) -> dict[str, Any]:
    """Return the values of attributes by name."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _check(request: Any) -> None:
    """Check what the definitions say only in words: lengths of ids, order of times, the sender's attributes."""
    ((_, (sender, *_)),) = request.ListFields()  # one sender per request
    assert read_attributes(sender.resource.attributes).keys() >= {"service.name", "service.instance.id", "host.name"}
    if isinstance(request, ExportTraceServiceRequest):
        for span in list_spans(request):
            assert (len(span.trace_id), len(span.span_id)) == (16, 8)
            assert len(span.parent_span_id) in (0, 8)
            assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    elif isinstance(request, ExportLogsServiceRequest):
        assert all(len(record.trace_id) == 16 for record in list_records(request))
