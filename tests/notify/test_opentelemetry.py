"""OpenTelemetry: incidents are log records, and metrics are pushed; the collector parses each request."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from sentinel.config.otlp import OtlpSettings, find_export
from sentinel.config.settings import Duration, ReceiverSettings, parse_settings
from sentinel.daemon.frontend.telemetry import Telemetry
from sentinel.diagnose.case import Case
from sentinel.errors import ConfigError
from sentinel.notify import Delivery, Message, Route
from sentinel.notify.limiter import Limiter
from sentinel.notify.outbox import Outbox
from sentinel.notify.pipeline import Pipeline
from sentinel.notify.receivers import opentelemetry
from sentinel.notify.routes import make_routes
from sentinel.otlp.metrics import MEGATRON
from sentinel.otlp.protocol import trace_id
from tests.notify.cases import case
from tests.notify.collector import Collector, list_metrics, list_records, read_attributes
from tests.notify.test_pipeline import until
from tests.notify.vendors import serving

SECRET = "s3cr3ts3cr3ts3cr3ts3cr3t"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    with serving(made):
        yield made


def deliver(url: str, message: Message) -> Delivery:
    async def scenario() -> Delivery:
        receiver = opentelemetry.OpenTelemetry(ReceiverSettings(name="otel", type="opentelemetry", url=url))
        delivery = await receiver.deliver(message)
        await receiver.close()
        return delivery

    return asyncio.run(scenario())


def message(*cases: Case) -> Message:
    return Message(run="train", run_id="r1", alert=cases[0].alert, cases=cases)


@pytest.mark.parametrize("compression", ["", "gzip"])
def test_an_incident_is_a_log_record(collector: Collector, monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    assert deliver(collector.url, message(case(ranks=2))).fault is None
    (record,) = list_records(collector.take("logs"))
    assert collector.headers[0].get("content-encoding", "") == compression
    assert record.event_name == "sentinel.incident"
    assert (record.severity_number, record.severity_text) == (18, "critical")
    assert record.body.string_value == case().summary
    assert record.trace_id == trace_id("r1")
    assert record.time_unix_nano == round(case().time * 1e9)
    assert record.observed_time_unix_nano <= time.time_ns()
    said = read_attributes(record.attributes)
    assert (said["sentinel.alertname"], said["sentinel.run_id"], said["sentinel.state"]) == (
        "LossSpike",
        "r1",
        "firing",
    )
    assert said["sentinel.members"] == "rank 0, rank 1"


def test_an_incident_of_one_rank_names_it_as_metrics_do(collector: Collector) -> None:
    assert deliver(collector.url, message(case(ranks=1))).fault is None
    (record,) = list_records(collector.take("logs"))
    assert read_attributes(record.attributes)["dl.rank"] == 0


def test_a_clock_that_is_far_out_is_no_fault(collector: Collector) -> None:
    odd = [case(), case("0.2"), case("0.3")]
    odd[0].time, odd[1].time, odd[2].time = float("nan"), 1e300, -5.0
    assert deliver(collector.url, message(*odd)).fault is None
    assert [record.time_unix_nano for record in list_records(collector.take("logs"))] == [0, 9 * 10**18, 0]


@pytest.mark.slow
@pytest.mark.parametrize("silence", ["", "3f9a1c"], ids=["no silence", "the parent is silenced"])
def test_of_a_problem_only_what_is_new_is_recorded(collector: Collector, silence: str) -> None:
    """Through the pipeline: a message has all cases of a problem, but each change must be recorded only once."""

    def put(pipeline: Pipeline, identity: str, alert: str, state: str, silence: str = "") -> None:
        made = case(identity, state, alert=alert)
        made.problem_id, made.silenced = "0.1", silence
        pipeline.put(made)

    async def scenario() -> None:
        receiver = opentelemetry.OpenTelemetry(ReceiverSettings(name="otel", type="opentelemetry", url=collector.url))
        grouping = opentelemetry.KIND.grouping
        assert grouping is not None
        tracks = opentelemetry.KIND.tracks
        route = Route("otel", receiver, lambda _: True, 30.0, grouping, Limiter(), edits=True, tracks=tracks)
        pipeline = Pipeline("train", "r1", [route], outbox=Outbox(None))
        pipeline.start()
        steps: Sequence[tuple[str, str, str]] = [
            ("0.1", "LossSpike", "firing"),
            ("0.2", "GradientSpike", "firing"),
            ("0.2", "GradientSpike", "resolved"),
            ("0.1", "LossSpike", "resolved"),
        ]
        for count, step in enumerate(steps):
            put(pipeline, *step)
            await until(lambda count=count: pipeline.status()[0]["sent"] > count)  # type: ignore[misc]
            if not count:
                put(pipeline, *step, silence)
        await pipeline.close()
        await receiver.close()

    asyncio.run(scenario())
    said = [read_attributes(record.attributes) for one in collector.all() for record in list_records(one["request"])]
    assert [(one["sentinel.alertname"], one["sentinel.state"]) for one in said] == [
        ("LossSpike", "firing"),
        ("GradientSpike", "firing"),
        ("GradientSpike", "resolved"),
        ("LossSpike", "resolved"),
    ]


def test_the_address_comes_from_the_settings_or_opentelemetrys_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_export(OtlpSettings(), "metrics") == ("http://localhost:4318/v1/metrics", {}, False, None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel:4318/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%2Cb, tenant=7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2500")
    assert find_export(OtlpSettings(), "logs") == (
        "http://otel:4318/v1/logs", {"api-key": "a,b", "tenant": "7"}, False, 2.5,
    )  # fmt: skip
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://other:9/own")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "api-key=m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "500")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "gzip")
    assert find_export(OtlpSettings(), "metrics") == ("http://other:9/own", {"api-key": "m"}, True, 0.5)
    assert find_export(OtlpSettings(), "traces").url == "http://otel:4318/v1/traces"
    assert find_export(OtlpSettings(url="http://mine:1"), "metrics").url == "http://mine:1/v1/metrics"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")  # for other exporters, which use another port
    assert find_export(OtlpSettings(url="http://mine:1"), "logs").url == "http://mine:1/v1/logs"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PROTOCOL", "grpc", "PROTOCOL is 'grpc', and Sentinel speaks http/protobuf; name the collector's port"),
        ("TIMEOUT", "10s", "OTEL_EXPORTER_OTLP_TIMEOUT holds no number of milliseconds"),
        ("ENDPOINT", "otel:4317", "OTEL_EXPORTER_OTLP_ENDPOINT holds no http:// or https:// URL"),
        ("LOGS_ENDPOINT", "otel:4317", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT holds no http:// or https:// URL"),
        ("COMPRESSION", "zstd", "OTEL_EXPORTER_OTLP_COMPRESSION is 'zstd'; there are: gzip, none"),
        ("HEADERS", "authorization=s3cr3t%0Ax", "OTEL_EXPORTER_OTLP_HEADERS holds a line end"),
    ],
)
def test_a_variable_that_cannot_be_followed_is_reported_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", value)
    with pytest.raises(ConfigError, match=said) as error:
        find_export(OtlpSettings(), "logs")
    assert "s3cr3t" not in str(error.value)
    delivery = deliver("", message(case()))
    assert (delivery.fault, delivery.retry, delivery.detail) == ("settings", True, str(error.value))


def test_without_the_package_a_note_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("sentinel.otlp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.common.v1.common_pb2", None)
    settings = parse_settings('[otlp]\n[[receivers]]\nname = "otel"\ntype = "opentelemetry"\n', Path("s.toml"))
    routes, notes = make_routes(settings)
    assert not routes
    assert "opentelemetry needs the package opentelemetry.proto" in notes[0]
    assert "pip install 'training-sentinel[otlp]'" in notes[0]
    made = push(settings.otlp, lambda made: made.status()["metrics"]["failed"] >= 1)
    assert "pip install 'training-sentinel[otlp]'" in made.status()["metrics"]["trouble"]


def families() -> Iterator[Any]:
    loss = GaugeMetricFamily("sentinel_run_loss", "Of the run: the loss.", labels=("run",))
    loss.add_metric(("r1",), 2.5)
    yield loss
    norms = GaugeMetricFamily("sentinel_grad_norm", "Of a rank: its norm.", labels=("run", "rank"))
    norms.add_metric(("r1", "0"), 1.5)
    norms.add_metric(("r1", "11"), math.nan)
    yield norms
    steps = CounterMetricFamily("sentinel_rule_firings", "How often.", labels=("run", "rule"))
    steps.add_metric(("r1", "LossSpike"), 40.0)
    yield steps
    yield GaugeMetricFamily("sentinel_nothing", "Of which there is no sample.")


def push(settings: OtlpSettings | None, done: Callable[[Telemetry], bool]) -> Telemetry:
    """Push until `done(push)`."""

    async def scenario() -> Telemetry:
        made = Telemetry(settings, families, {})
        task = asyncio.create_task(made.serve())
        await until(lambda: done(made))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return made

    return asyncio.run(scenario())


def test_metrics_have_megatrons_names_and_nemo_lens_ranks(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=night%20runs")
    push(OtlpSettings(url=collector.url, interval=Duration(3600)), lambda made: made.status()["metrics"]["sent"] == 1)
    request = collector.take("metrics")
    said = read_attributes(request.resource_metrics[0].resource.attributes)
    assert (said["service.name"], said["deployment.environment"]) == ("sentinel", "night runs")
    loss, norms, firings = list_metrics(request)
    assert (loss.name, norms.name, firings.name) == (
        "megatron.training.loss", "sentinel_grad_norm", "sentinel_rule_firings",
    )  # fmt: skip
    (point,) = loss.gauge.data_points
    assert (point.as_double, read_attributes(point.attributes)) == (2.5, {"sentinel.run_id": "r1"})
    first, second = norms.gauge.data_points
    assert [read_attributes(point.attributes)["dl.rank"] for point in (first, second)] == [0, 11]
    assert math.isnan(second.as_double)
    assert (firings.sum.is_monotonic, firings.sum.aggregation_temporality) == (True, 2)
    (point,) = firings.sum.data_points
    assert read_attributes(point.attributes) == {"sentinel.run_id": "r1", "sentinel.rule": "LossSpike"}
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano <= time.time_ns()


def test_megatrons_names_belong_to_series_that_exist() -> None:
    assert len(MEGATRON) == 3
    assert all(MEGATRON)


def test_a_collector_that_fails_is_reported_once_and_pushed_to_again(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.notify.entry.FIRST_PAUSE", 0.01)
    collector.answers += [(503, {}, b""), (503, {}, b"")]
    made = push(
        OtlpSettings(url=collector.url, interval=Duration(0.01)), lambda made: made.status()["metrics"]["sent"] >= 1
    )
    assert {**made.status()["metrics"], "sent": 1} == {"sent": 1, "failed": 2, "trouble": ""}
    assert caplog.text.count("503") == 1


def test_a_secret_in_a_header_is_never_shown(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sentinel.notify.entry.FIRST_PAUSE", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET}")
    collector.answers += [(500, {}, b"")]
    made = push(
        OtlpSettings(url=collector.url, interval=Duration(0.01)), lambda made: made.status()["metrics"]["sent"] >= 1
    )
    assert collector.headers[0]["authorization"] == f"Bearer {SECRET}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer {SECRET}%0A")
    failed = push(
        OtlpSettings(url=collector.url, interval=Duration(0.01)), lambda made: made.status()["metrics"]["failed"] >= 1
    )
    assert "OTEL_EXPORTER_OTLP_HEADERS holds a line end" in failed.status()["metrics"]["trouble"]
    assert SECRET not in caplog.text + repr(made.status()) + failed.status()["metrics"]["trouble"]


def test_nothing_is_sent_because_a_variable_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel:4318")
    file = tmp_path / "sentinel.toml"
    assert parse_settings("", file).otlp is None
    assert parse_settings('[otlp]\ninterval = "30s"\n', file).otlp == OtlpSettings(interval=Duration(30))
    with pytest.raises(ConfigError, match=r":2: url is no http:// or https:// URL"):
        parse_settings('[otlp]\nurl = "collector:4317"\n', file)
    with pytest.raises(ConfigError, match=r"unknown key 'endpoint'; there are: .*url"):
        parse_settings('[otlp]\nendpoint = "http://x"\n', file)
