"""A real collector (Rotel) accepts what the daemon sends, and passes it on to a backend that parses it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.node.question import ask_daemon
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import HEALTHY
from tests.notify.collector import Collector, list_metrics, list_records, list_spans, read_attributes
from tests.notify.vendors import serving
from tests.waiting import until

LOSS = "megatron.training.loss"
RULES = "group: mine\nrules: [{alert: High, scope: run, expr: loss > 100, severity: critical}]\n"


@pytest.fixture(scope="module")
def rotel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program from PyPI's package rotel, which exists for x86_64 and Python before 3.14."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("rotel is not installed (pip install rotel)")
    program = tmp_path_factory.mktemp("rotel") / "rotel-agent"  # in the wheel it is not executable
    shutil.copy(Path(found.origin).with_name(program.name), program)
    program.chmod(0o755)
    return program


@pytest.fixture
def backend() -> Iterator[Collector]:
    made = Collector()
    with serving(made):
        yield made


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(rotel: Path, port: int, backend: Collector) -> Iterator[None]:
    """Run a collector that takes OTLP over HTTP at `port`, and kill it at the end."""
    command = [str(rotel), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{find_free_port()}", "--disable-batching"]
    command += ["--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", backend.url]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("ROTEL_")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=bare)
    try:
        until(lambda: process.poll() is not None or _is_open(port), "the collector's port")
        assert process.poll() is None, f"the collector ended with {process.returncode}"
        yield
    finally:
        process.kill()
        process.wait()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_real_collector_takes_all_and_after_it_was_killed_nothing_is_missing_or_there_twice(
    rotel: Path, backend: Collector, tmp_path: Path
) -> None:
    port = find_free_port()
    settings, rules = tmp_path / "sentinel.toml", tmp_path / "rules.yaml"
    settings.write_text(
        f'[otlp]\nurl = "http://127.0.0.1:{port}"\ninterval = "200ms"\n'
        f'[[receivers]]\nname = "otel"\ntype = "opentelemetry"\nurl = "http://127.0.0.1:{port}"\n'
    )
    rules.write_text(RULES)
    spans, records, metrics = list[str](), list[str](), set[str]()

    def receive(count_spans: int, count_records: int) -> None:
        while len(spans) < count_spans or len(records) < count_records or LOSS not in metrics:
            found = backend.next()
            if found["signal"] == "traces":
                spans.extend(span.name for span in list_spans(found["request"]))
            elif found["signal"] == "logs":
                attributes = [read_attributes(record.attributes) for record in list_records(found["request"])]
                records.extend(f"{one['sentinel.alertname']} {one['sentinel.state']}" for one in attributes)
            else:
                metrics.update(metric.name for metric in list_metrics(found["request"]))

    options = ("--config", str(settings), "--rules", str(rules))
    with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        with running(rotel, port, backend):
            rank.steps(0, [*HEALTHY[:20], 200.0])
            rank.say(wire.SnapshotTaken(seq=20, seconds=0.1, nbytes=100, time=time.time()))
            receive(1, 1)
        rank.steps(21, HEALTHY[:5])
        rank.say(wire.SnapshotTaken(seq=25, seconds=0.1, nbytes=100, time=time.time()))
        until(lambda: ask_daemon(path, "status")["otlp"]["traces"]["trouble"], "a request that was not taken")
        with running(rotel, port, backend):
            receive(2, 2)
            rank.say(wire.Goodbye())
            rank.expect(wire.Kept)
            receive(3, 2)
            assert ended(process) == 0
    assert spans == ["sentinel.snapshot", "sentinel.snapshot", "sentinel.attempt"]
    assert records == ["High firing", "High resolved"]
    assert "sentinel_build_info" in metrics
    assert {one["signal"] for one in backend.all()} <= {"metrics"}, "something came twice"
    assert not backend.refused
