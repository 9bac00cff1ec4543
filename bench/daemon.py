"""Plays a day of a run in minutes: how much a daemon stores, how fast a plot of it is, how large the daemon gets.

    python -m bench.daemon                       # 8 ranks, 2 steps a second, 24 hours, at speed; about ten minutes
    python -m bench.daemon --hours 2

A real daemon with the stock rules. The ranks are simulated: they send what a model of 200 layers sends (20 signals at
each step, layers at every 16th), as fast as the daemon stores it. Bars: 200 MB of history, 1 s for a plot, 150 MB of
resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from sentinel import wire
from sentinel.node import paths
from sentinel.signals import SIGNALS
from sentinel.store import History

BATCH = 64
"""Steps that a rank sends in one message."""
AHEAD = 16
"""Messages of a rank that may be unconfirmed: the daemon confirms once a second."""
BARS = {"history_mb": 200.0, "plot_seconds": 1.0, "rss_mb": 150.0}
RUN = "bench"


class Ranks:
    """All ranks of a run, each with a connection of its own."""

    def __init__(self, path: Path, count: int, layers: int) -> None:
        self._draw, self._layers = random.Random(0), layers
        self._names = [s.name for s in SIGNALS.values() if s.scope == "rank" and s.tier == 0 and s.name != "fp16"]
        self._sampled = [s.name for s in SIGNALS.values() if s.scope == "rank" and s.tier in (1, 2)]
        self._sampled = [name for name in self._sampled if not SIGNALS[name].part_of]
        self._of_layers = [s.name for s in SIGNALS.values() if s.scope == "layer" and s.tier == 2]
        self._connections, self._frames = list[socket.socket](), list[wire.Frames]()
        self._kept, self._sent = [0] * count, 0
        placed = tuple(
            wire.Layer(name=f"model.layers.{n}.weight", shape=(8, 8), dtype="float32") for n in range(layers)
        )
        for number in range(count):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(str(path))
            identity = wire.Identity(
                run=RUN, run_id=RUN, rank=number, world_size=count, pid=os.getpid(), session=f"s{number}"
            )
            connection.sendall(wire.frame(wire.Hello(version="bench", identity=identity)))
            self._connections.append(connection)
            self._frames.append(wire.Frames())
        self._connections[0].sendall(wire.frame(wire.LayerTable(digest="t", layers=placed)))

    def send(self, first: int, began: float) -> None:
        """Send `BATCH` steps of all ranks, from step `first` on; step 0 was at the Unix time `began`."""
        seqs = array("q", range(first, first + BATCH))
        times = array("d", [began + seq / 2 for seq in seqs]).tobytes()
        rows = array("H", range(0, BATCH, 16))
        sampled = [seq for seq in seqs if seq % 16 == 0]
        for number, connection in enumerate(self._connections):
            columns = {name: wire.Column(self._noise(name, BATCH)) for name in self._names}
            columns |= {name: wire.Column(self._noise(name, len(rows)), rows.tobytes()) for name in self._sampled}
            blocks = tuple(self._block(seq) for seq in sampled) if number == 0 else ()
            batch = wire.Batch(seqs=seqs.tobytes(), times=times, columns=columns, layers=blocks)
            connection.sendall(wire.frame(batch))
        self._sent += 1

    def wait(self, ahead: int) -> None:
        """Wait until the daemon has stored all batches of each rank except for `ahead` at most."""
        while min(self._kept) < self._sent - ahead:
            ready, _, _ = select.select(self._connections, [], [], 60)
            if not ready:
                sys.exit("the daemon keeps nothing any more")
            for connection in ready:
                at = self._connections.index(connection)
                for body in self._frames[at].feed(connection.recv(1 << 16)):
                    message = wire.to_rank(body)
                    if isinstance(message, wire.Kept):
                        extra = 2 if at == 0 else 1  # the hello, and rank 0's layer table
                        self._kept[at] = message.frames - extra

    def close(self) -> None:
        for connection in self._connections:
            connection.sendall(wire.frame(wire.Goodbye()))

    def _noise(self, name: str, count: int) -> bytes:
        level = {"loss": 2.5, "loss_scale": 65536.0, "step_skipped": 0.0, "clip_limit": 1.0}.get(name, 1.0)
        spread = 0.0 if name in ("loss_scale", "step_skipped", "clip_limit", "micro_batches") else 0.02
        if name.endswith("_bytes"):
            level = 8e9
        return array("d", [level * (1 + spread * (self._draw.random() - 0.5)) for _ in range(count)]).tobytes()

    def _block(self, seq: int) -> wire.LayerBlock:
        zero = array("f", bytes(4 * self._layers)).tobytes()
        stats = {
            name: zero if name == "layer_nonfinite" else
            array("f", [self._draw.random() for _ in range(self._layers)]).tobytes()
            for name in self._of_layers
        }  # fmt: skip
        return wire.LayerBlock(seq=seq, table="t", stats=stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = int(options.hours * 3600 * 2) // BATCH * BATCH
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SENTINEL_RUNTIME": f"{folder}/r", "SENTINEL_STATE": f"{folder}/s"}
        os.environ["SENTINEL_CONFIG"] = f"{folder}/sentinel.toml"
        Path(os.environ["SENTINEL_CONFIG"]).write_text("[daemon]\nhttp = 0\n")
        result = measure_daemon(steps, options)
    print(json.dumps(result, indent=2) if options.json else describe_result(result))


def measure_daemon(steps: int, options: argparse.Namespace) -> dict[str, float]:
    directory = paths.run_directory(RUN)
    path = paths.socket_path(directory)
    command = [sys.executable, "-m", "sentinel", "daemon", "--directory", str(directory), "--nice", "0"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not path.exists():
            time.sleep(0.05)
        began, wall = time.time() - steps / 2, time.monotonic()
        ranks = Ranks(path, options.ranks, options.layers)
        for first in range(0, steps, BATCH):
            ranks.send(first, began)
            ranks.wait(AHEAD)
            if sys.stderr.isatty():
                print(f"\r{first / steps:4.0%}", end="", file=sys.stderr)
        ranks.wait(0)
        rss, cpu = _read_peak(process.pid), _read_cpu(process.pid)
        took = time.monotonic() - wall
        ranks.close()
        process.wait(60)
    history = paths.state_directory() / "runs" / f"{RUN}.sqlite"
    size = sum(file.stat().st_size for file in history.parent.glob(f"{history.name}*"))
    at = time.perf_counter()
    with History(history) as kept:
        points = len(kept.series("loss").values)
    return {
        "steps": steps, "ranks": options.ranks, "history_mb": size / 1e6, "points": points,
        "plot_seconds": time.perf_counter() - at, "rss_mb": rss / 1e6, "cpu_ms_a_step": 1e3 * cpu / steps,
        "seconds": took,
    }  # fmt: skip


def describe_result(result: dict[str, float]) -> str:
    lines = [
        f"{result['steps']:.0f} steps of {result['ranks']:.0f} ranks, {result['steps'] / 7200:.1f} hours, "
        f"in {result['seconds']:.0f} s; {result['cpu_ms_a_step']:.2f} ms of the daemon's CPU a step",
        f"a plot of the loss has {result['points']:.0f} points",
    ]
    for name, bar in BARS.items():
        lines.append(f"{name:<14} {result[name]:8.2f}  bar {bar:g}  " + ("held" if result[name] <= bar else "MISSED"))
    return "\n".join(lines)


def _read_peak(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return float(found[1]) * 1024 if found else 0.0


def _read_cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
