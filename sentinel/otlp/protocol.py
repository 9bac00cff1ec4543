"""The common parts of requests for all signals (opentelemetry.io/docs/specs/otlp, 1.5)."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import platform
from collections.abc import Mapping

from google.protobuf.message import Message
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from sentinel._version import __version__
from sentinel.config.otlp import Signal, find_export, read_resource
from sentinel.config.receivers import Endpoint

SCOPE = InstrumentationScope(name="training-sentinel", version=__version__)
RANK = "dl.rank"
"""The attribute for a rank in nemo-lens (github.com/NVIDIA-NeMo/Lens, src/nemo/lens/semconv.py)."""
LATEST = 9e9
"""Largest Unix seconds, in the year 2255: as nanoseconds they fit into 64 bits with a sign."""

Value = str | bool | int | float


def make_request(
    settings: Endpoint, signal: Signal, message: Message
) -> tuple[str, bytes, dict[str, str], float | None]:
    """Return URL, content and headers of a POST, and the environment's time-out in seconds. Raises ConfigError."""
    export = find_export(settings, signal)
    content = message.SerializeToString()
    headers = {**export.headers, "Content-Type": "application/x-protobuf"}
    if export.compressed:
        content = gzip.compress(content, 1)
        headers["Content-Encoding"] = "gzip"
    return export.url, content, headers, export.timeout


def make_resource() -> Resource:
    """Return the sender: this process, and what the environment says about it."""
    host = platform.node()
    known = {"host.name": host, "service.instance.id": f"{host}-{os.getpid()}", **read_resource()}
    return Resource(attributes=make_attributes(known))


def make_attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    """Return attributes in OTLP's form."""
    return [KeyValue(key=name, value=_make_value(value)) for name, value in values.items()]


def _make_value(value: Value) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(string_value=value)


def nanoseconds(seconds: float) -> int:
    """Return Unix seconds as nanoseconds; the nearest that fits, where a clock is far off."""
    return 0 if math.isnan(seconds) else round(min(max(seconds, 0.0), LATEST) * 1e9)


def trace_id(run_id: str) -> bytes:
    """Return the trace id of a run: the same from every daemon and node."""
    return _hash(run_id, 16)


def span_id(*parts: object) -> bytes:
    """Return the id of a span of a run: the same if the span is sent again."""
    return _hash("\0".join(map(str, parts)), 8)


def _hash(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=size).digest()
