"""Spans of what has ended go to an OpenTelemetry collector, each once, even if a daemon is killed with -9."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.config.otlp import OtlpSettings
from sentinel.daemon.frontend.telemetry import Telemetry
from sentinel.notify.entry import Entry
from sentinel.otlp.protocol import trace_id
from sentinel.store import History, Store
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import HEALTHY
from tests.daemon.test_restart import kept, kill
from tests.notify.collector import Collector, list_metrics, list_records, list_spans, read_attributes
from tests.notify.vendors import serving


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    with serving(made):
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "r1.sqlite", run="train", run_id="r1")
    made.records.begin_attempt(0, b"hello")
    yield made
    made.close()


class Sender:
    """Sends what a daemon sends at each interval, for one run."""

    def __init__(self, store: Store, collector: Collector, **settings: Any) -> None:
        self.watch: Any = SimpleNamespace(store=store, run=SimpleNamespace(name="train", run_id="r1"))
        self.collector = collector
        self.settings = OtlpSettings(url=collector.url, signals=("traces",), **settings)

    def send(self, *, over: bool = False, rounds: int = 1) -> list[Any]:
        """Send, and return the spans that arrive."""

        async def scenario() -> None:
            made = self.telemetry = Telemetry(self.settings, lambda: iter(()), {"r1": self.watch})
            for _ in range(rounds):
                await made.send(self.settings)
            if over:
                await made.finish([self.watch])
            await made.close()

        asyncio.run(scenario())
        assert not self.collector.refused
        return [span for one in self.collector.all() for span in list_spans(one["request"])]


def test_what_took_time_is_a_span_of_its_attempt(store: Store, collector: Collector) -> None:
    store.records.add_event(0, 5, "phase", rank=3, name="evaluation")
    store.records.add_event(0, 5, "phase", rank=3, name="")
    store.records.add_event(0, 6, "snapshot", rank=3, bytes=1000, seconds=0.5)
    store.records.add_event(0, 6, "snapshot on disk", bytes=2000, seconds=1.5)
    store.records.add_event(0, 7, "standstill over", rank=3, seconds=90.0)
    store.records.add_event(0, 9, "rollback", ok=True, alert="LossSpike", to=6, at=9, seconds=0.25, reason="", sign=8)
    store.records.add_event(
        0, 9, "rollback", ok=False, alert="LossSpike", to=6, at=9, seconds=0.0, reason="no\x1b snapshot", sign=8
    )
    store.records.end_attempt(0)
    spans = Sender(store, collector).send(over=True)
    assert [span.name.removeprefix("sentinel.") for span in spans] == [
        "phase", "snapshot", "checkpoint", "stall", "rollback", "rollback", "attempt",
    ]  # fmt: skip
    phase, snapshot, _, stall, rollback, failed, attempt = spans
    assert {span.trace_id for span in spans} == {trace_id("r1")}
    assert {span.parent_span_id for span in spans[:-1]} == {attempt.span_id}
    assert attempt.parent_span_id == b""
    assert len({span.span_id for span in spans}) == len(spans)
    assert read_attributes(phase.attributes)["sentinel.phase"] == "evaluation"
    assert read_attributes(snapshot.attributes) == {
        "sentinel.run": "train", "sentinel.run_id": "r1", "sentinel.attempt": 0, "sentinel.seq": 6, "dl.rank": 3,
        "sentinel.bytes": 1000,
    }  # fmt: skip
    assert stall.end_time_unix_nano - stall.start_time_unix_nano == pytest.approx(90e9, rel=1e-6)
    assert read_attributes(rollback.attributes)["sentinel.alert"] == "LossSpike"
    assert [(span.status.code, span.status.message) for span in (rollback, failed)] == [(0, ""), (2, "no snapshot")]


def test_an_attempt_ends_what_is_open_in_it_and_says_how_it_failed(store: Store, collector: Collector) -> None:
    sender = Sender(store, collector)
    store.records.add_event(0, 5, "phase", rank=0, name="evaluation")
    store.records.add_event(0, 5, "process ended", rank=1, status=-9)
    assert sender.send() == []
    store.records.end_attempt(0)
    assert sender.send() == [], "its ranks may come back"
    store.records.begin_attempt(1, b"hello")
    phase, attempt = sender.send()
    assert (phase.name, attempt.name) == ("sentinel.phase", "sentinel.attempt")
    assert phase.parent_span_id == attempt.span_id
    assert attempt.status.message == "rank 1 ended with exit status -9"
    store.records.end_attempt(1)
    (second,) = sender.send(over=True)
    assert (read_attributes(second.attributes)["sentinel.attempt"], second.status.code) == (1, 0)


def test_only_spans_that_were_not_accepted_are_sent_again(store: Store, collector: Collector) -> None:
    sender = Sender(store, collector)
    store.records.add_event(0, 1, "snapshot", rank=0, seconds=0.5)
    collector.answers += [(503, {}, b"")]
    assert sender.send() == []
    assert sender.telemetry.status()["traces"]["trouble"] == "it answers 503"
    (span,) = sender.send()
    assert sender.send() == []
    store.records.add_event(0, 2, "snapshot", rank=0, seconds=0.5)
    (other,) = sender.send()
    assert other.span_id != span.span_id


def test_a_collector_is_left_alone_for_as_long_as_it_asks(store: Store, collector: Collector) -> None:
    store.records.add_event(0, 1, "snapshot", rank=0, seconds=0.5)
    collector.answers += [(429, {"Retry-After": "120"}, b"")]
    assert Sender(store, collector).send(rounds=3) == []
    assert len(collector.headers) <= 1


def test_spans_that_a_collector_rejects_are_not_sent_again(store: Store, collector: Collector) -> None:
    sender = Sender(store, collector)
    store.records.add_event(0, 1, "snapshot", rank=0, seconds=0.5)
    collector.answers += [(400, {}, b"")]
    assert sender.send() == []
    assert sender.telemetry.status()["traces"] == {"sent": 0, "failed": 1, "trouble": "it answers 400"}
    assert sender.send() == []


def test_many_events_are_several_requests(store: Store, collector: Collector) -> None:
    for seq in range(1200):
        store.records.add_event(0, seq, "snapshot", rank=0, seconds=0.5)
    assert len(Sender(store, collector).send()) == 1200


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_daemon_loses_nothing_and_nothing_is_sent_twice(collector: Collector, tmp_path: Path) -> None:
    settings = tmp_path / "sentinel.toml"
    settings.write_text(
        f'[otlp]\nurl = "{collector.url}"\ninterval = "50ms"\n'
        f'[[receivers]]\nname = "otel"\ntype = "opentelemetry"\nurl = "{collector.url}"\n'
    )
    rules = tmp_path / "rules.yaml"
    rules.write_text("group: mine\nrules: [{alert: High, scope: run, expr: loss > 100, severity: critical}]\n")
    options = ("--config", str(settings), "--rules", str(rules))
    spans, records = [], []

    def receive(count_spans: int, count_records: int) -> None:
        while len(spans) < count_spans or len(records) < count_records or "megatron.training.loss" not in names:
            found = collector.next()
            if found["signal"] == "traces":
                spans.extend(list_spans(found["request"]))
            elif found["signal"] == "logs":
                records.extend(list_records(found["request"]))
            else:
                names.update(metric.name for metric in list_metrics(found["request"]))

    names = set[str]()
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [*HEALTHY[:20], 200.0])
        rank.say(wire.SnapshotTaken(seq=20, seconds=0.1, nbytes=100, time=time.time()))
        rank.say(wire.PhaseChanged(name="evaluation", seq=21, time=time.time()))
        receive(1, 1)
        kept(lambda history: '"evaluation"' in history.span_mark())
        told = wait_for_outbox()
        kill(process)
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello(next_seq=21)
        rank.say(wire.PhaseChanged(name="", seq=21, time=time.time()))
        rank.steps(21, HEALTHY[:5])
        receive(2, 2)
        kept(_is_all_sent)
        wait_for_outbox(told)
        kill(process)
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello(next_seq=26)
        rank.say(wire.Goodbye())
        rank.expect(wire.Kept)
        receive(3, 2)
        process.wait(60)
    for found in collector.all():
        spans.extend(list_spans(found["request"]) if found["signal"] == "traces" else [])
        records.extend(list_records(found["request"]) if found["signal"] == "logs" else [])
    assert [span.name for span in spans] == ["sentinel.snapshot", "sentinel.phase", "sentinel.attempt"]
    states = [read_attributes(record.attributes)["sentinel.state"] for record in records]
    assert states == ["firing", "resolved"]
    assert {"megatron.training.loss", "sentinel_build_info"} <= names
    assert not collector.refused


def wait_for_outbox(former: Sequence[Entry] = ()) -> list[Entry]:
    """Wait until all of the outbox is recorded as delivered and differs from `former`; return its entries."""
    found: list[Entry] = []

    def is_delivered(history: History) -> bool:
        with contextlib.closing(sqlite3.connect(history.path)) as database:
            bodies = database.execute("SELECT body FROM outbox").fetchall()
        found[:] = [msgspec.msgpack.decode(body, type=Entry) for (body,) in bodies]
        return found != list(former) and not any(entry.pending for entry in found)

    kept(is_delivered)
    return found


def _is_all_sent(history: History) -> bool:
    rows = [row for row, _ in history.events_after(0, 1000)]
    return f'"row":{max(rows)},' in history.span_mark()
