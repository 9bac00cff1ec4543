"""Runs simulated ranks, another node's exporter, and a real Prometheus that scrapes them."""

from __future__ import annotations

import contextlib
import http.server
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sentinel import wire
from sentinel.daemon.frontend.faults import FaultCounter
from sentinel.daemon.frontend.metrics import LiveCollector
from sentinel.rulebook.loader import Reloads
from sentinel.runs import Run
from sentinel.runs.devices import Devices, Gpu
from sentinel.signals import SIGNALS
from sentinel.web.http import exposition
from sentinel.wire import heartbeat_page
from tests.daemon.simulated import SimulatedRank
from tests.web.test_metrics import PACE, watched

RANKS = 4
LAYERS = tuple(f"h.{number}.weight" for number in range(24))


@contextlib.contextmanager
def training(path: Path) -> Iterator[None]:
    """Run ranks that report all signals ten times a second, with a loss of 9 and a heartbeat."""
    stop, page = threading.Event(), os.memfd_create(heartbeat_page.PAGE)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, page)
        ranks = [stack.enter_context(SimulatedRank(path, number, RANKS)) for number in range(RANKS)]
        _beat(page)
        for rank in ranks:
            hello = wire.frame(wire.Hello(version="test", identity=rank.identity))
            socket.send_fds(rank.connection, [hello], [page])
            rank.expect(wire.Welcome)
        thread = threading.Thread(target=_train, args=(ranks, page, stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _train(ranks: list[SimulatedRank], page: int, stop: threading.Event) -> None:
    placed = tuple(wire.Layer(name=name, shape=(8, 8), dtype="float32") for name in LAYERS)
    ranks[0].say(wire.LayerTable(digest="t", layers=placed))
    draw, seq = random.Random(0), 0
    names = [signal.name for signal in SIGNALS.values() if signal.scope == "rank" and signal.tier >= 0]
    of_layers = [signal.name for signal in SIGNALS.values() if signal.scope == "layer"]
    while not stop.wait(0.1):
        _beat(page)
        for rank in ranks:
            columns = {name: wire.Column(array("d", [1 + draw.random()]).tobytes()) for name in names}
            columns["loss"] = wire.Column(array("d", [9.0]).tobytes())
            stats = {name: array("f", [draw.random() for _ in LAYERS]).tobytes() for name in of_layers}
            blocks = (wire.LayerBlock(seq=seq, table="t", stats=stats),) if rank is ranks[0] else ()
            seqs, times = array("q", [seq]).tobytes(), array("d", [time.time()]).tobytes()
            rank.say(wire.Batch(seqs=seqs, times=times, columns=columns, layers=blocks, pace=PACE))
        seq += 1


def _beat(page: int) -> None:
    now = time.monotonic()
    written = heartbeat_page.Heartbeat(
        beat=now, progress=int(now * 10), progressed=now, steps=100, work=0, place=0, paused=0, longest=0.1, cpu=1.0,
        thread=0, ident=0, moved=0.0, signal=0,
    )  # fmt: skip
    os.pwrite(page, heartbeat_page.pack_heartbeat(written), 0)


@contextlib.contextmanager
def gpu_node() -> Iterator[str]:
    """Serve our metrics of made-up GPUs, and dcgm-exporter's metrics of them; yield host and port."""
    body = _devices() + b"".join(
        f'{name}{{gpu="{n}",UUID="GPU-{n}",modelName="H200",hostname="gpu-node",device="nvidia{n}"}} 0.5\n'.encode()
        for n in range(RANKS)
        for name in ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_DEV_XID_ERRORS")
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _devices() -> bytes:
    devices = Devices("gpu-node", {signal.name: 1.0 for signal in SIGNALS.values() if signal.scope == "node"})
    run = Run("train", "r1", 0.0)
    for number in range(RANKS):
        uuid = f"GPU-{number}"
        values = {signal.name: 1.0 for signal in SIGNALS.values() if signal.scope == "gpu"}
        devices.gpus[uuid] = Gpu(number, uuid, "H200", f"00000000:0{number}:00.0", f"nvidia{number}", values=values)
        identity = wire.Identity(run="train", run_id="r1", rank=number, world_size=RANKS, session=f"s{number}")
        run.hello(wire.Hello(version="t", identity=identity, gpus=(uuid,)), 0.0)
    run.attempt.devices = devices
    families = LiveCollector({"r1": watched(run)}, Reloads(), FaultCounter()).collect()
    ours = ("sentinel_gpu_", "sentinel_rank_gpu", "sentinel_host")
    return exposition([family for family in families if family.name.startswith(ours)])


@contextlib.contextmanager
def served_prometheus(root: Path, daemon: str, exporter: str) -> Iterator[str]:
    """Run a Prometheus that scrapes both every half second, and yield the address of its API."""
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is not installed (Debian package: prometheus)")
    targets = {"sentinel": daemon, "gpu-node": exporter}
    jobs = [{"job_name": name, "static_configs": [{"targets": [target]}]} for name, target in targets.items()]
    config = root / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [found, f"--config.file={config}", f"--storage.tsdb.path={root}/tsdb"]
    with (root / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.kill()
        process.wait()
