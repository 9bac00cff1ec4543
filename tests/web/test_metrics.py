"""What Prometheus scrapes: checked by its linter, parsed, and scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sentinel import wire
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.frontend.metrics import LiveCollector
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.node import paths
from sentinel.notify.delivery_queue import Counts
from sentinel.prometheus import metric_names
from sentinel.rulebook import loader
from sentinel.rulebook.loader import Reloads
from sentinel.runs import Run
from sentinel.runs.steps import LayerStats
from sentinel.signals import CLOCK, SIGNALS
from sentinel.store import History
from sentinel.web import http
from sentinel.web.http import exposition
from tests.daemon.simulated import SimulatedRank
from tests.run_parts import watch_run
from tests.waiting import until
from tests.web.conftest import Served
from tests.zygote import TRAINING, ForkedProcess, start_zygote

LASTING = Path(__file__).parent.parent / "programs" / "lasting.py"
PACE = wire.Pace(
    spacing={"1": 1, "2": 8}, wanted={"1": 1, "2": 8}, costs={"hooks": 0.01, "sender": 0.002, "daemon": 0.003}
)


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian package: prometheus)")
    return found


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values by (name, label values in the order of the labels' names); no series may come twice."""
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


@pytest.mark.processes
def test_two_ranks_and_an_incident(served: Served) -> None:
    with SimulatedRank(served.socket, 0, 2) as one, SimulatedRank(served.socket, 1, 2) as two:
        for rank in (one, two):
            rank.hello(step_offset=100)
        one.steps(0, [1.0, 2.0], step_seconds=[0.5, 0.5])
        two.steps(0, [1.0, float("nan")], step_seconds=[0.5, 0.7])
        got = until(
            lambda: samples(text) if "NonFiniteLoss" in (text := served.get("/metrics").text) else {}, "metrics"
        )
    assert got["sentinel_run_info", "0", "train", "r1"] == 1
    assert got["sentinel_loss", "0", "r1"] == 2.0
    assert got["sentinel_loss", "1", "r1"] != got["sentinel_loss", "1", "r1"]
    assert got["sentinel_run_step_seconds", "r1"] == 0.7
    assert got["sentinel_step", "0", "r1"] == 101
    assert got["sentinel_last_step_timestamp_seconds", "r1"] == 1e9 + 1
    assert got["sentinel_rank_up", "1", "r1"] == 1
    assert got["sentinel_incidents_total", "NonFiniteLoss", "r1", "critical"] == 1
    assert got["sentinel_incidents_firing", "NonFiniteLoss", "r1", "critical"] == 1
    assert got["sentinel_rules", "r1", "no_data"] > 0
    assert got["sentinel_rule_evaluations_total", "r1"] == 2 * (len(loader.load().rules) + 1)
    assert got["sentinel_daemon_faults_total",] == 0
    assert ("sentinel_run_grad_norm", "r1") not in got


@pytest.mark.processes
def test_what_a_script_logs_is_a_series_by_name(served: Served) -> None:
    with SimulatedRank(served.socket) as rank:
        names = {name: "rank" for name in ("reward", 'a "quoted" name', *(f"n{number}" for number in range(300)))}
        rank.say(wire.Hello(version="test", identity=rank.identity, signals=names))
        rank.expect(wire.Welcome)
        rank.steps(0, [1.0, 2.0], **{name: [3.0, 4.0] for name in names})
        rank.steps(2, [1.0])
        got = until(
            lambda: s if ("sentinel_step", "0", "r1") in (s := samples(served.get("/metrics").text)) else {}, "it"
        )
    assert got["sentinel_run_logged", "reward", "r1"] == 4.0, "as it was logged last"
    assert got["sentinel_run_logged", 'a "quoted" name', "r1"] == 4.0
    assert sum(name == "sentinel_run_logged" for name, *_ in got) == 256


@pytest.mark.processes
def test_prometheus_own_linter_finds_nothing(served: Served) -> None:
    with SimulatedRank(served.socket) as rank:
        rank.hello()
        rank.steps(0, [7.0], **{s.name: [1.0] for s in SIGNALS.values() if s.scope == "rank" and s.name != "loss"})
        text = until(lambda: t if 'alert="High"' in (t := served.get("/metrics").text) else "", "the incident")
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_a_thousand_ranks_are_a_bounded_number_of_series(collector: LiveCollector, watch: WatchedRun) -> None:
    def counted(ranks: int) -> int:
        watch.run.attempt = crowded(ranks).attempt
        return sum(len(family.samples) for family in collector.collect())

    per_rank = (counted(1024) - counted(512)) / 512
    of_steps = sum(signal.by_rank and signal.tier != CLOCK for signal in SIGNALS.values())
    assert per_rank == of_steps + 5 + 3 + 2  # info, up, step, dropped, skipped; three costs; spacing of two tiers


def test_layers_that_stand_out_are_named_and_all_are_counted(collector: LiveCollector, watch: WatchedRun) -> None:
    names = tuple(f"h.{number}.weight" for number in range(100))
    watch.run.attempt = crowded(1).attempt
    for seq in range(5):
        norms = [0.5 * 10.0 ** (number % 10 - 5) for number in range(100)]
        bad = [0.0] * 100
        if seq == 4:
            norms[7], norms[8], norms[9] = 900.0, math.inf, math.nan
            bad[9:30] = [12.0, *[1.0] * 20]
        stats = {"layer_grad_norm": array("f", norms), "layer_nonfinite": array("f", bad)}
        watch.run.attempt.recent_layers.append((seq, LayerStats(names, stats, b"\x00" + b"\x01" * 99)))
    got = samples(exposition(collector.collect()).decode())
    assert got["sentinel_layers", "r1"] == 99
    assert got["sentinel_layers_grad_norm_max", "r1"] == pytest.approx(5e3)
    assert got["sentinel_layers_grad_norm_min", "r1"] == pytest.approx(5e-6)
    named = {key[1]: value for key, value in got.items() if key[0] == "sentinel_layer_grad_norm"}
    assert len(named) == 10
    assert math.isnan(named["h.9.weight"])
    assert named["h.8.weight"] == math.inf
    grown = {key[1]: value for key, value in got.items() if key[0] == "sentinel_layer_grad_growth_ratio"}
    assert grown["h.7.weight"] == pytest.approx(18.0)
    bad_ones = {key[1]: value for key, value in got.items() if key[0] == "sentinel_layer_nonfinite_elements"}
    assert (len(bad_ones), bad_ones["h.9.weight"]) == (10, 12.0)
    assert got["sentinel_layers_nonfinite", "r1"] == 21
    buckets = {key[1]: value for key, value in got.items() if key[0] == "sentinel_layers_by_grad_norm_bucket"}
    assert (buckets["0.0001"], buckets["1000.0"], buckets["+Inf"]) == (19, 88, 98)


def test_names_say_their_unit_as_prometheus_wants_it(collector: LiveCollector, watch: WatchedRun) -> None:
    watch.run.attempt = crowded(1).attempt
    for family in collector.collect():
        name, labels = family.name, family._labelnames  # type: ignore[attr-defined]
        assert re.fullmatch(r"sentinel(_[a-z0-9]+)+", name)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|mib|gib|percent|count|sum|bucket)(_|$)", name), name
        assert not name.endswith(("_total", "_created")), f"{name}: prometheus_client adds it"
        assert name.endswith("_timestamp_seconds") or "timestamp" not in name
        assert not {"job", "instance", "le", "quantile", "__name__"} & set(labels), name
        assert "layer" not in labels or name.startswith("sentinel_layer_"), f"{name}: not limited to a few layers"
        assert family.documentation.endswith(".")
        assert not name.endswith("_info") or all(sample.value == 1 for sample in family.samples)


def test_every_signal_of_a_rank_is_there_as_the_runs(collector: LiveCollector) -> None:
    names = {family.name for family in collector.collect()}
    for signal in SIGNALS.values():
        name = "sentinel_run_" + metric_names.with_unit(signal)
        assert (name in names) == (signal.scope == "rank" and signal.tier != CLOCK and not signal.part_of), name
        for unit in ("seconds", "bytes", "ratio"):
            assert name.endswith(f"_{unit}") == (signal.unit == unit), name


def test_each_series_that_a_rule_for_prometheus_may_use_exists(collector: LiveCollector) -> None:
    """Alerts over RankLost, OutOfMemory and CollectiveDesync used to be written over series that no scrape had."""
    names = {family.name for family in collector.collect()}
    asked = {metric_names.name_series(name, "rank") for name in SIGNALS} - {""}
    assert asked - names == set()


def test_a_rank_that_has_gone_takes_its_series_with_it(collector: LiveCollector, watch: WatchedRun) -> None:
    watch.run.attempt = crowded(3).attempt
    watch.run.attempt.lose(1, None)
    watch.run.attempt.lose(2, wire.Goodbye())
    got = samples(exposition(collector.collect()).decode())
    assert {key[1]: value for key, value in got.items() if key[0] == "sentinel_rank_up"} == {"0": 1, "1": 0}
    assert not [key for key in got if key[1:] == ("2", "r1")]


def test_faults_are_counted() -> None:
    faults = FaultCounter()
    log = logging.getLogger()
    log.addHandler(faults)
    log.error("a sentence")
    try:
        raise RuntimeError
    except RuntimeError:
        log.exception("a fault")
    finally:
        log.removeHandler(faults)
    family = next(f for f in LiveCollector({}, Reloads(), faults).collect() if f.name == "sentinel_daemon_faults")
    assert family.samples[0].value == 1


def test_a_fault_in_one_part_leaves_the_others(
    collector: LiveCollector, watch: WatchedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch.run, "attempt", None)
    for _ in range(2):
        names = {family.name for family in collector.collect()}
    assert "sentinel_build_info" in names
    assert "sentinel_step" not in names
    assert sum("left out" in record.message for record in caplog.records) == 5  # each part once
    assert b"sentinel_build_info" in exposition(collector.collect())


def test_a_scrape_of_many_ranks_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("train", "r1", 0.0)
    watch = watched(run)
    for number in range(600):
        identity = wire.Identity(run="train", run_id="r1", rank=number, world_size=600, session=f"s{number}")
        watch.ingest.hello(wire.Hello(version="t", identity=identity), 0.0)
    families = list(LiveCollector({"r1": watch}, Reloads(), FaultCounter()).collect())
    whole = exposition(families)
    assert b"".join(piece for family in copy.deepcopy(families) for piece in http.pieces(family)) == whole
    made = list[int]()
    turns = 0

    class Backend:
        def families(self) -> Iterator[Metric]:
            for family in families:
                made.append(turns)
                yield family

    async def scraped() -> bytes:
        nonlocal turns
        backend: Any = Backend()
        transport = httpx2.ASGITransport(http.application(backend, "token"))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = asyncio.create_task(client.get("/metrics"))
            while not asked.done():
                turns += 1
                await asyncio.sleep(0)
            return (await asked).content

    monkeypatch.setattr(http, "PIECE_SECONDS", 0.0)
    assert asyncio.run(scraped()) == whole
    assert made == sorted(set(made)), "the loop has a turn between two families"


@pytest.fixture
def watch() -> WatchedRun:
    return watched(Run("train", "r1", 0.0))


@pytest.fixture
def collector(watch: WatchedRun) -> LiveCollector:
    return LiveCollector({"r1": watch}, Reloads(), FaultCounter())


def watched(run: Run) -> WatchedRun:
    """Return a watched run with one receiver, which has failed several times."""
    counts = Counts(sent=3, failed=Counter({"rate limited": 2}), given_up=1)
    notifier: Any = SimpleNamespace(
        pipeline=SimpleNamespace(queues=[SimpleNamespace(name="w", counts=counts, pending=1)])
    )
    return watch_run(run, notifier=notifier)


def test_what_receivers_took_and_did_not(collector: LiveCollector) -> None:
    got = samples(exposition(collector.collect()).decode())
    assert got["sentinel_notifications_total", "w", "r1"] == 3
    assert got["sentinel_notifications_failed_total", "rate_limited", "w", "r1"] == 2
    assert got["sentinel_notifications_given_up_total", "w", "r1"] == 1
    assert got["sentinel_notifications_pending", "w", "r1"] == 1


def crowded(ranks: int) -> Run:
    """Return a run of many ranks, each of which has reported one step."""
    run = Run("train", "r1", 0.0)
    for number in range(ranks):
        identity = wire.Identity(run="train", run_id="r1", rank=number, world_size=ranks, session=f"s{number}")
        rank, _ = run.hello(wire.Hello(version="t", identity=identity), 0.0)
        columns = {name: wire.Column(array("d", [1.0]).tobytes()) for name, signal in SIGNALS.items() if signal.by_rank}
        seqs, times = array("q", [0]).tobytes(), array("d", [1e9]).tobytes()
        run.attempt.take(rank, wire.Batch(seqs=seqs, times=times, columns=columns, pace=PACE), 0.0)
    list(run.attempt.take_closed(0.0))
    return run


@pytest.fixture
def prometheus(settings: Path, private_places: Path) -> Iterator[str]:
    """A real Prometheus that discovers daemons by their files; yields the address of its API."""
    binary = tool("prometheus")
    folder, config = private_places / "discovery", private_places / "prometheus.yml"
    settings.write_text(f'[daemon]\nhttp = 0\nfile_sd = "{folder}"\n')
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n  - job_name: sentinel\n    file_sd_configs:\n"
        f'      - {{files: ["{folder}/sentinel-*.json"], refresh_interval: 1s}}\n'
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={private_places}/tsdb"]
    with (private_places / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.kill()
        process.wait()


def asked(api: str, query: str) -> list[dict[str, Any]]:
    """Return Prometheus's answer to a query; an empty list until it serves."""
    try:
        answer = httpx2.get(f"{api}/query", params={"query": query})
    except httpx2.TransportError:
        return []
    return list(answer.json()["data"]["result"]) if answer.status_code == 200 else []


@pytest.mark.processes
def test_a_real_prometheus_scrapes_a_real_run(prometheus: str, private_places: Path) -> None:
    environment = {**os.environ, "SENTINEL_RUN_ID": "real"}
    how = {"zygote": start_zygote(TRAINING), "env": environment, "stdin": subprocess.PIPE}
    with ForkedProcess([sys.executable, LASTING], cwd="/", **how) as run:
        until(lambda: asked(prometheus, 'sentinel_run_loss{run="real"}'), "the loss", 90)
        assert asked(prometheus, 'up{job="sentinel"}')[0]["value"][1] == "1"
        step = until(lambda: asked(prometheus, 'increase(sentinel_step{run="real"}[1m]) > 0'), "a rising step", 90)
        assert step[0]["metric"]["rank"] == "0"
        info = asked(prometheus, "sentinel_run_loss * on (run) group_left (name) sentinel_run_info")
        assert info[0]["metric"]["name"] == "lasting"
        scraped = asked(prometheus, 'sentinel_run_loss{run="real"}[1m]')[0]["values"]
        run.communicate()
        assert run.returncode == 0
    with History(paths.histories()[0]) as history:
        kept = set(history.series("loss").values)
    assert {float(value) for _, value in scraped} <= kept
    until(lambda: not _targets(prometheus), "the end of the target", 90)
    assert not list((private_places / "discovery").glob("sentinel-*.json"))
    assert not paths.run_directory("real").exists()


def _targets(api: str) -> list[Any]:
    answer: dict[str, Any] = json.loads(httpx2.get(f"{api}/targets").text)
    return list(answer["data"]["activeTargets"])
