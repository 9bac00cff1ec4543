"""Measures what the coordinator of a large job costs, how fast a page comes, and how much a node sends.

    python -m bench.cluster                                    # 64 nodes x 8 ranks, a session each, for a minute
    python -m bench.cluster --nodes 1024 --sessions 32

A real daemon is node 0 and the coordinator, with simulated ranks that make one step a second. A few processes
(bench/cluster_nodes.py) send it what the daemons of all other nodes would, by real Zenoh sessions over loopback. From
time to time one of these nodes has an incident, and a webhook receiver gets a page about it.

    cpu_percent    CPU time of the coordinator's process (from /proc) over wall time, in percent of one core
    page_seconds   from a node's handing its event to Zenoh until the receiver has the page; `[grouping] wait = 0s`
    storm          all nodes have the same alert within a second, after the rest was measured: one page must result
    node_bytes     bytes per second and node to the coordinator, with all that Zenoh adds: TCP's count of bytes received

Bars: a tenth of a core and 200 MB for 64 x 8, one core for 1,024 x 8; a page within 2 s; 4 kB per second and node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.cluster_nodes import SAMPLED_EVERY, SECONDS, STORM, Part, Seen
from bench.places import make_places
from sentinel import wire
from sentinel.demo.inbox import Inbox
from sentinel.node import paths
from sentinel.node.question import ask_daemon

RUN_ID, SECRET = "load", "a secret of all nodes"
SETTINGS = """
[daemon]
http = 0
[grouping]
wait = "0s"
interval = "0s"
[[receivers]]
name = "pager"
type = "webhook"
url = "http://{inbox}/"
"""
BARS = {"page_seconds": 2.0, "node_bytes": 4000.0, "pages_lost": 0, "refused": 0}
BARS |= {"storm_page_seconds": 2.0, "storm_pages": 1}
START_SECONDS = 180.0
SETTLE_SECONDS = 10.0
"""Seconds between all nodes being known and the measurement: a long job does not notice what its first steps cost."""
STORM_SECONDS = 10.0
"""Duration of the storm that ends the measurement."""
ALWAYS = SECONDS | {"loss": 2.5, "optimizer_seconds": 0.1, "data_seconds": 0.01, "grad_norm": 1.0, "batch_size": 32.0}
SAMPLED = {"rss_bytes": 8e9, "memory_allocated_bytes": 4e10, "memory_reserved_bytes": 5e10, "memory_peak_bytes": 5e10}
"""Typical values of a healthy rank: those of each step (`ALWAYS`), and of each `SAMPLED_EVERY`-th (`SAMPLED`)."""


class LocalRanks:
    """The simulated ranks of the coordinator's own node."""

    def __init__(self, path: Path, count: int, nodes: int) -> None:
        self._step, self._draw = 0, random.Random(0)
        self._connections = []
        for number in range(count):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(str(path))
            identity = wire.Identity(
                run="load", run_id=RUN_ID, rank=number, world_size=count * nodes, local_world_size=count,
                pid=os.getpid(), session=f"s{number}", node=0, hostname="host-0000.cluster.local",
            )  # fmt: skip
            connection.sendall(wire.frame(wire.Hello(version="bench", identity=identity)))
            connection.setblocking(False)
            self._connections.append(connection)

    def step_until(self, done: Callable[[], bool]) -> None:
        """Make one step a second until `done()` is true."""
        began = time.monotonic()
        while not done():
            self._send_step()
            time.sleep(max(began + 1.0 - time.monotonic(), 0.0))
            began += 1.0

    def _send_step(self) -> None:
        levels = ALWAYS | (SAMPLED if self._step % SAMPLED_EVERY == 0 else {})
        seqs, times = array("q", [self._step]).tobytes(), array("d", [time.time()]).tobytes()
        for connection in self._connections:
            noisy = {name: level * (1 + 0.02 * self._draw.random()) for name, level in levels.items()}
            columns = {name: wire.Column(array("d", [value]).tobytes()) for name, value in noisy.items()}
            batch = wire.Batch(seqs=seqs, times=times, columns=columns)
            connection.sendall(wire.frame(batch))
            with contextlib.suppress(BlockingIOError):
                connection.recv(1 << 16)
        self._step += 1


class Usage(msgspec.Struct, frozen=True):
    """What the coordinator has used so far: CPU seconds, and bytes received and sent, at a monotonic time."""

    at: float
    cpu_seconds: float
    received: int
    sent: int


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    address, inbox = find_free_address(), find_free_address()
    os.environ |= make_places(folder, SETTINGS.format(inbox=inbox))
    os.environ |= {"SENTINEL_CLUSTER": address, "SENTINEL_CLUSTER_SECRET": SECRET}
    load_before = os.getloadavg()[0]
    directory = paths.run_directory(RUN_ID)
    path = paths.socket_path(directory)
    pages = Inbox(folder / "pages.jsonl")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_start("sentinel.demo.inbox", inbox, str(folder / "pages.jsonl")))
        daemon = stack.enter_context(_start("sentinel", "daemon", "--directory", str(directory), "--nice", "0"))
        await_daemon(path)
        ranks = LocalRanks(path, options.ranks, options.nodes)
        speakers = [stack.enter_context(_start("bench.cluster_nodes", part)) for part in _make_parts(options, address)]
        deadline = time.monotonic() + START_SECONDS
        ranks.step_until(lambda: _count_alive(path) == options.nodes or time.monotonic() > deadline)
        met = _count_alive(path)
        settled = time.monotonic() + SETTLE_SECONDS
        ranks.step_until(lambda: time.monotonic() > settled)
        before, window_from = _read_usage(daemon.pid, address), time.time()
        end = time.monotonic() + options.seconds
        ranks.step_until(lambda: time.monotonic() > end)
        after, window_to = _read_usage(daemon.pid, address), time.time()
        rss = psutil.Process(daemon.pid).memory_info().rss
        for speaker in speakers:
            _say(speaker, "storm")
        last = time.monotonic() + STORM_SECONDS
        ranks.step_until(lambda: time.monotonic() > last)
        storm = _read_usage(daemon.pid, address)
        seen = [_stop_speaker(speaker) for speaker in speakers]
        pages.take()
        job = ask_daemon(path, "status")["runs"][0]["job"]
    came = {page.incident: page.time for page in pages.pages}
    fired = {identity: at for one in seen for identity, at in one.fired.items() if window_from < at < window_to}
    waits = [came[identity] - at for identity, at in fired.items() if identity in came]
    stormed = [page.time - min(one.storm_at for one in seen) for page in pages.pages if page.alert == STORM]
    seconds = after.at - before.at
    return {
        "nodes": options.nodes, "ranks": options.ranks, "sessions": options.sessions or options.nodes - 1,
        "seconds": round(seconds), "cpu_percent": 100 * (after.cpu_seconds - before.cpu_seconds) / seconds,
        "rss_mb": rss / 1e6, "pages": len(waits), "pages_lost": len(fired) - len(waits),
        "page_seconds": max(waits, default=0.0), "page_seconds_median": statistics.median(waits) if waits else 0.0,
        "storm_pages": len(stormed),
        "storm_page_seconds": min(stormed, default=math.inf),
        "storm_cpu_percent": 100 * (storm.cpu_seconds - after.cpu_seconds) / (storm.at - after.at),
        "node_bytes": (after.received - before.received) / seconds / (options.nodes - 1),
        "beat_bytes": (after.sent - before.sent) / seconds / (options.nodes - 1),
        "met": met, "alive_at_end": 1 + sum(one.known for one in seen), "behind_steps": max(one.behind for one in seen),
        "refused": job["refused"], "speakers_cpu_seconds": sum(one.cpu_seconds for one in seen),
        "load_before": load_before, "load_after": os.getloadavg()[0],
    }  # fmt: skip


def _make_parts(options: argparse.Namespace, address: str) -> Iterator[str]:
    """Yield equal parts of the nodes 1, 2 ..., one for each process, as JSON."""
    others, count = options.nodes - 1, min(options.processes, options.nodes - 1)
    sessions = options.sessions or others
    for index in range(count):
        part = Part(
            address=address, secret=SECRET, run_id=RUN_ID, first=1 + others * index // count,
            last=others * (index + 1) // count, ranks=options.ranks,
            sessions=sessions * (index + 1) // count - sessions * index // count,
            incident_seconds=options.incident_seconds * count,
        )  # fmt: skip
        yield msgspec.json.encode(part).decode()


@contextlib.contextmanager
def _start(*command: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", *command], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _say(speaker: subprocess.Popen[str], line: str) -> None:
    assert speaker.stdin is not None
    speaker.stdin.write(f"{line}\n")
    speaker.stdin.flush()


def _stop_speaker(speaker: subprocess.Popen[str]) -> Seen:
    assert speaker.stdout is not None
    _say(speaker, "stop")
    return msgspec.json.decode(speaker.stdout.readline(), type=Seen)


def _count_alive(path: Path) -> int:
    job = next((run["job"] for run in ask_daemon(path, "status")["runs"]), None)
    return sum(node["state"] == "alive" for node in job["nodes"]) if job and job["view"] == "coordinator" else 0


def _read_usage(pid: int, address: str) -> Usage:
    times, (received, sent) = psutil.Process(pid).cpu_times(), _count_bytes(address)
    return Usage(time.monotonic(), times.user + times.system, received, sent)


def _count_bytes(address: str) -> tuple[int, int]:
    """Return the bytes (received, sent) on the open connections to an address, by the kernel's count."""
    listed = subprocess.run(["ss", "-tinH", "src", address], capture_output=True, text=True, check=True).stdout
    received, sent = (
        sum(map(int, re.findall(rf"\b{name}:(\d+)", listed))) for name in ("bytes_received", "bytes_acked")
    )
    return received, sent


def await_daemon(path: Path) -> None:
    """Wait until the daemon's socket exists, or exit after `START_SECONDS`."""
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit("the daemon does not start")
        time.sleep(0.05)


def find_free_address() -> str:
    """Return `127.0.0.1:PORT` with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def describe_result(result: dict[str, Any]) -> str:
    bars = BARS | ({"cpu_percent": 10.0, "rss_mb": 200.0} if result["nodes"] <= 64 else {"cpu_percent": 100.0})
    lines = []
    for name, value in result.items():
        held = f"  bar {bars[name]:g}  {'held' if value <= bars[name] else 'MISSED'}" if name in bars else ""
        lines.append(f"{name:<20} {value:10.2f}{held}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", type=int, default=0, help="of all nodes together; as it is, each has its own")
    parser.add_argument("--processes", type=int, default=2, help="that speak for the nodes")
    parser.add_argument("--incident-seconds", type=float, default=2.0, help="between two incidents of the job")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="c") as folder:
        result = measure(options, Path(folder))
    print(json.dumps(result, indent=2) if options.json else describe_result(result))


if __name__ == "__main__":
    main()
