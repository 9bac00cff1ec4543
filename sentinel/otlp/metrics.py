"""Encode metrics, as Prometheus would scrape them, as an OTLP request.

Metrics that Megatron-LM sends too, with the same meaning, have Megatron's name (github.com/NVIDIA/Megatron-LM,
megatron/core/telemetry/training_metrics.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, ScopeMetrics

from sentinel.otlp.protocol import RANK, SCOPE, Value, make_attributes, make_resource, nanoseconds
from sentinel.prometheus.metric_names import name_series

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MEGATRON = {name_series(name, "run"): f"megatron.training.{name}" for name in ("loss", "grad_norm", "learning_rate")}
"""Sentinel's series -> Megatron's name. Its histogram of step times is in ms and its memory in GB: those differ from
Sentinel's."""


def encode_metrics(families: Iterable[Metric], began: float, now: float) -> ExportMetricsServiceRequest:
    """Return a request to /v1/metrics. `began`, `now`: Unix seconds; counters count since `began`."""
    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add(resource=make_resource()).scope_metrics.add(scope=SCOPE)
    for family in families:
        if family.samples and family.type in ("gauge", "counter"):
            _add_family(scope, family, nanoseconds(began), nanoseconds(now))
    return request


def _add_family(scope: ScopeMetrics, family: Metric, began: int, now: int) -> None:
    """Add a gauge or counter. The histogram of layers is left out: it can fall, which OTLP's may not."""
    metric = scope.metrics.add(name=MEGATRON.get(family.name, family.name), description=family.documentation)
    if family.type == "counter":
        metric.sum.is_monotonic = True
        metric.sum.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        points = metric.sum.data_points
    else:
        began, points = 0, metric.gauge.data_points
    for sample in family.samples:
        points.add(
            attributes=make_attributes(_name_labels(sample.labels)),
            start_time_unix_nano=began,
            time_unix_nano=now,
            as_double=sample.value,
        )


def _name_labels(labels: Mapping[str, str]) -> dict[str, Value]:
    named: dict[str, Value] = {f"sentinel.{name}": text for name, text in labels.items() if name not in ("run", "rank")}
    if run_id := labels.get("run"):
        named["sentinel.run_id"] = run_id
    if rank := labels.get("rank"):
        named[RANK] = int(rank)
    return named
