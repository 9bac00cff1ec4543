"""Checks that a hostile user of a service delays neither the judging of another user's steps nor the service's end.

Each trial starts a real service (`sentinel daemon --service`; without root, a daemon with `--stay`), lets a hostile
process do one of `CASES` to it, and has another user's run report ten steps a second, and ask for its status after
each. The trial holds if

    each step is judged within 1 s           `worst_ms` is the longest time from a step to the status that shows it
    no frame of the hostile user holds others up: from a step to its status it takes under 100 ms at the median, and
    no callback of the service's loop takes 100 ms of CPU (`longest_ms`; from the first step to the last)
    SIGTERM ends the service within 10 s during the attack: the hostile process outlives the service
    the service needs no more than 700 MB
    the hostile process reaches the service throughout, from the first step to SIGTERM: `longest_pause_ms`

As root the two are different users of the machine; otherwise they are two runs of one user, where only the daemon's
survival, all steps and its end are promised. The tests' sample is short and asserts no times: it runs on busy machines.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sentinel import wire
from sentinel.daemon.ingest.shares import LAYERS
from tests.daemon.simulated import SimulatedRank
from tests.second_user import NOBODY, SOMEBODY

SECONDS = float(os.environ.get("SENTINEL_PROOF_SECONDS", "30"))
SAMPLE_SECONDS = 5.0
BAR_SECONDS, MEDIAN_SECONDS, LONGEST_SECONDS, END_SECONDS = 1.0, 0.1, 0.1, 10.0
PAUSE_SECONDS = 8.0
"""Most between two contacts of the hostile process with the service: some cases hold their connections for 5 s."""
OUTLIVES_SECONDS = 180.0
"""How long the hostile process goes on after the other user's last step, unless it is ended before."""
MEMORY_KB = 700 * 1024
"""Most resident memory of the service at its peak."""
START_SECONDS = 120.0
TURNS = "turns"
"""Name of the file that `_measured_daemon.py` writes."""


def encode(kind: str, **fields: Any) -> bytes:
    """Return a frame with any content, even content that no rank would send."""
    import msgspec

    body = msgspec.msgpack.encode({"type": kind, **fields})
    return struct.pack(">I", len(body)) + body


def doubles(numbers: Iterator[float] | range | list[float]) -> bytes:
    return array("d", numbers).tobytes()


def steps(first: int, count: int, stride: int = 1, *, stream: int = 0, names: int = 1) -> bytes:
    seqs = range(first, first + count * stride, stride)
    columns = {"loss" if not name else f"signal {name}": [doubles([1.0] * count), b""] for name in range(names)}
    return encode(
        "batch",
        stream=stream,
        seqs=array("q", seqs).tobytes(),
        times=doubles([1e9 + place for place in range(count)]),
        columns=columns,
    )


class Contact:
    """The hostile process's contacts with the service, and its longest pause, in memory shared with its parent."""

    def __init__(self) -> None:
        self._shared = multiprocessing.RawArray("d", [0, time.monotonic(), 0.0])

    def note(self) -> None:
        count, last, longest = self._shared
        now = time.monotonic()
        self._shared[:] = [count + 1, now, max(longest, now - last)]

    def wait_for_next(self) -> None:
        count, deadline = self._shared[0], time.monotonic() + OUTLIVES_SECONDS / 2
        while self._shared[0] == count:
            assert time.monotonic() < deadline, "the hostile process does not reach the service"
            time.sleep(0.001)

    def find_longest_pause(self) -> float:
        """Return the longest pause between contacts, in seconds, counted from this object's creation."""
        _, last, longest = self._shared
        return float(max(longest, time.monotonic() - last))


class Hostile:
    """A connection that keeps no rules but those of the socket."""

    contact: Contact

    def __init__(self, path: Path, run_id: str, *, world: int = 1, hello: bool = True, rank: int = 0) -> None:
        self.path, self.run_id, self.world, self.rank = path, run_id, world, rank
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.connect(str(path))
        self.contact.note()
        self.connection.setblocking(False)
        if hello:
            identity = {"run": "hostile", "run_id": run_id, "world_size": world, "rank": rank, "session": run_id}
            self.send(encode("hello", protocol=wire.PROTOCOL, version="x", identity=identity), until=time.time() + 5)

    def send(self, data: bytes, until: float) -> None:
        """Send data until a Unix time, discarding answers. Raises OSError if the service cuts the connection."""
        view = memoryview(data)
        while view and time.time() < until:
            with contextlib.suppress(BlockingIOError):
                self.connection.recv(1 << 16)
            try:
                view = view[self.connection.send(view) :]
            except BlockingIOError:
                time.sleep(0.002)
            self.contact.note()


def again(attack: Callable[[Path, int, float], None], path: Path, until: float, contact: Contact) -> None:
    """Attack until the time is up, and start over whenever the service cuts the attack off."""
    Hostile.contact, number = contact, 0
    while time.time() < until:
        number += 1
        try:
            attack(path, number, until)
        except OSError:
            time.sleep(0.02)


def one_huge_batch(path: Path, number: int, until: float) -> None:
    """Send two batches of 600,000 steps in one connection, 14 MB each."""
    Hostile(path, f"huge{number}").send(steps(0, 600_000) * 2, until)


def full_batches(path: Path, number: int, until: float) -> None:
    """Send batches with as many steps as a batch may hold, one after the other."""
    hostile = Hostile(path, f"full{number}")
    for first in range(0, 1 << 40, 4096):
        hostile.send(steps(first, 4096), until)
        if time.time() > until:
            return


def far_apart(path: Path, number: int, until: float) -> None:
    hostile = Hostile(path, f"far{number}")
    for first in range(0, 1 << 50, 4096 << 24):
        hostile.send(steps(first, 4096, 1 << 24), until)
        if time.time() > until:
            return


def invented_streams(path: Path, number: int, until: float) -> None:
    hostile = Hostile(path, f"streams{number}")
    for stream in range(1, 1 << 30):
        hostile.send(steps(0, 10, stream=stream), until)
        if time.time() > until:
            return


def many_columns(path: Path, number: int, until: float) -> None:
    hostile = Hostile(path, f"columns{number}")
    for first in range(0, 1 << 40, 256):
        hostile.send(steps(first, 256, names=2000), until)
        if time.time() > until:
            return


def small_frames(path: Path, number: int, until: float) -> None:
    hostile = Hostile(path, f"small{number}")
    for first in range(0, 1 << 40, 1000):
        hostile.send(b"".join(steps(first + place, 1) for place in range(1000)), until)
        if time.time() > until:
            return


def a_large_world(path: Path, number: int, until: float) -> None:
    """Announce ranks that never come, and send steps that wait for them."""
    hostile = Hostile(path, f"world{number}", world=1 << 18)
    for first in range(0, 16 * 1024, 512):
        hostile.send(steps(first, 512), until)
    time.sleep(max(0.0, min(3.0, until - time.time())))


def large_values(path: Path, number: int, until: float) -> None:
    """Send messages of a million empty maps."""
    content = b"\xdd" + struct.pack(">I", 1_000_000) + b"\x80" * 1_000_000
    body = b"\x84\xa4type\xa9collected\xa4what\xa1x\xa3seq\x01\xa7content\x81\xa1a" + content
    hostile = Hostile(path, f"values{number}")
    while time.time() < until:
        hostile.send(struct.pack(">I", len(body)) + body, until)


def layers(path: Path, number: int, until: float) -> None:
    """Send as many layers as a user of a service may have, all at every step."""
    hostile, count = Hostile(path, f"layers{number}"), LAYERS
    table = [{"name": f"blocks.{place}.weight", "shape": [2], "dtype": "f"} for place in range(count)]
    hostile.send(encode("layer-table", digest="d", layers=table), until)
    stats = {name: array("f", [1.0] * count).tobytes() for name in ("layer_grad_norm", "layer_grad_max")}
    for seq in range(1 << 30):
        block = {"seq": seq, "table": "d", "stats": stats}
        hostile.send(
            encode("batch", seqs=array("q", [seq]).tobytes(), times=doubles([1e9 + seq]), layers=[block]), until
        )
        if time.time() > until:
            return


def many_runs(path: Path, number: int, until: float) -> None:
    """Send steps of 203 runs, of which the service takes 48, in turn without a pause."""
    runs = [Hostile(path, f"runs{number}-{place}") for place in range(203)]
    seq = 0
    while time.time() < until:
        for run in runs:
            with contextlib.suppress(OSError):
                run.send(steps(seq, 1), until)
        seq += 1


def silent_connections(path: Path, number: int, until: float) -> None:
    """Open 300 connections that begin a frame of 15 MiB and never end it."""
    held = [Hostile(path, "", hello=False) for _ in range(300)]
    begun = struct.pack(">I", 15 << 20) + b"\x84" + b"x" * (15 << 20)
    for one in held:
        with contextlib.suppress(OSError):
            one.send(begun, min(until, time.time() + 0.2))
    time.sleep(max(0.0, min(5.0, until - time.time())))


def descriptors(path: Path, number: int, until: float) -> None:
    """Open as many connections as possible, up to 3,000, and send four descriptors on each."""
    held, null = [], os.open(os.devnull, os.O_RDONLY)
    for place in range(3000):
        one = Hostile(path, f"fd{place}", hello=False)
        held.append(one)
        with contextlib.suppress(OSError):
            socket.send_fds(one.connection, [b"\0"], [null] * 4)
        if time.time() > until:
            break
    time.sleep(max(0.0, min(5.0, until - time.time())))
    os.close(null)


def stages(path: Path, number: int, until: float) -> None:
    hostile = Hostile(path, f"stages{number}")
    for seq in range(1 << 30):
        hostile.send(steps(seq, 1) + encode("stage", name=f"s{seq}", seq=seq, time=1.0), until)
        if time.time() > until:
            return


CASES: tuple[Callable[[Path, int, float], None], ...] = (
    one_huge_batch, full_batches, far_apart, invented_streams, many_columns, small_frames, a_large_world, large_values,
    layers, many_runs, silent_connections, descriptors, stages,
)  # fmt: skip
TRIALS = len(CASES)
SAMPLE = (1,)


def run_trial(seed: int) -> dict[str, Any]:
    """Run one case, for 30 s, or 5 s in the tests' sample."""
    attack = CASES[seed % len(CASES)]
    sampled = "PYTEST_CURRENT_TEST" in os.environ
    seconds = SAMPLE_SECONDS if sampled else SECONDS
    apart = os.getuid() == 0
    with tempfile.TemporaryDirectory(prefix="sf", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        with serving(Path(folder), service=apart) as (path, process):
            until, contact = time.time() + seconds, Contact()
            hostile = start_process(NOBODY if apart else None, again, attack, path, until + OUTLIVES_SECONDS, contact)
            reader, writer = multiprocessing.Pipe(duplex=False)
            watched = start_process(SOMEBODY if apart else None, train, path, until, writer)
            writer.close()
            began = time.monotonic()
            try:
                taken, answered = reader.recv()
                longest = find_longest(Path(folder), began, time.monotonic())
                peak = peak_kb(process.pid)
                contact.wait_for_next()
                longest_pause = contact.find_longest_pause()
                process.send_signal(signal.SIGTERM)
                begun = time.monotonic()
                process.wait(60)
                ended = time.monotonic() - begun
                outlived = hostile.is_alive()
            finally:
                for one in (hostile, watched):
                    one.kill()
                    one.join()
    assert taken, f"{attack.__name__}: no step was judged"
    found = {
        "case": attack.__name__,
        "steps": len(taken),
        "worst_ms": 1e3 * max(taken),
        "median_ms": 1e3 * statistics.median(taken),
        "worst_answer_ms": 1e3 * max(answered),
        "longest_ms": 1e3 * longest,
        "end_ms": 1e3 * ended,
        "peak_mb": peak / 1024,
        "longest_pause_ms": 1e3 * longest_pause,
    }
    assert outlived, f"the attack ended before the service did: {found}"
    assert process.returncode == 0, found
    if apart:
        assert peak < MEMORY_KB, found
    if apart and not sampled:
        assert max(taken) < BAR_SECONDS, found
        assert statistics.median(taken) < MEDIAN_SECONDS, found
        assert longest < LONGEST_SECONDS, found
    if not sampled:
        assert ended < END_SECONDS, found
        assert longest_pause < PAUSE_SECONDS, found
    return found


def train(path: Path, until: float, results: Any) -> None:
    """Train as the other user; send the seconds from each step to the status that shows it, and of each answer."""
    taken, answered = [], []
    with SimulatedRank(path, run_id="honest") as rank:
        rank.hello()
        seq = 0
        while time.time() < until:
            begun = time.monotonic()
            rank.steps(seq, [1.0 + seq])
            while True:
                asked = time.monotonic()
                (run,) = rank.ask("status")["runs"]
                answered.append(time.monotonic() - asked)
                if run["values"].get("loss") == 1.0 + seq:
                    break
            taken.append(time.monotonic() - begun)
            seq += 1
            time.sleep(0.1)
        results.send((taken, answered))


def start_process(uid: int | None, function: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_as, args=(uid, function, *arguments), daemon=True)
    process.start()
    return process


def _as(uid: int | None, function: Callable[..., None], *arguments: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if uid is not None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    function(*arguments)


@contextlib.contextmanager
def serving(folder: Path, *, service: bool) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Run a service, or without root a daemon with `--stay`; yield (path of its socket, process)."""
    directory, environment = folder / "sentinel", {**os.environ, "SENTINEL_STATE": str(folder / "state")}
    options = ["--service"] if service else ["--stay"]
    measured = [sys.executable, "-m", "bench.proofs._measured_daemon", str(folder / TURNS)]
    command = [*measured, "daemon", *options, "--directory", str(directory)]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=log, env=environment)
    path, deadline = directory / "sentinel.sock", time.monotonic() + START_SECONDS
    try:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the service does not listen"
            time.sleep(0.02)
        yield path, process
    finally:
        process.kill()
        process.wait()
        log.close()
        if "SENTINEL_PROOF_LOG" in os.environ:
            print((folder / "log").read_text()[-4000:])


def find_longest(folder: Path, began: float, ended: float) -> float:
    """Return the longest CPU seconds of one callback of the service's loop between two moments."""
    turns = folder / TURNS
    lines = [line.split() for line in turns.read_text().splitlines()] if turns.exists() else []
    return max([float(spent) for at, spent in lines if began < float(at) < ended], default=0.0) / 1e3


def peak_kb(pid: int) -> int:
    """Return the peak of a process's resident memory, in kB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])
