"""Lets an earlier version write what the current one must read: histories, snapshots, a recording, an outbox, messages.

    git worktree add build/earlier 92762d0
    pip install --no-deps --target build/package build/earlier
    PYTHONPATH=build/package python tests/earlier/make.py tests/earlier/92762d0.tar.xz

It runs with that version's code, and so imports no modules of the current tests. README.md describes the archive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import torch
from torch import nn

SETTINGS = """
[daemon]
http = "off"
[grouping]
wait = "0s"
interval = "0s"
[[receivers]]
name = "pager"
type = "webhook"
url_env = "PAGER"
"""
NOBODY = "http://127.0.0.1:9/"
"""An address at which no receiver answers."""
EVERY, FAULT, LENGTH, STEPS = 50, 400, 20, 700
BROKEN, RECORDED = 60, 120


class Training:
    """A classifier whose data can be corrupted; `list_state` returns all of its state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20_000)
        self._data = torch.Generator().manual_seed(1)
        self._truth = torch.randn(16, 10, generator=torch.Generator().manual_seed(2))

    def step(self, *, corrupted: bool = False, broken: bool = False) -> None:
        x = torch.randn(64, 16, generator=self._data)
        y = (x @ self._truth).argmax(1)
        if corrupted:
            x, y = x * 50, torch.zeros_like(y)
        loss = nn.functional.cross_entropy(self.model(x), y) * (float("nan") if broken else 1.0)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def list_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a snapshot must restore to the bit, by name."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            state |= {f"adam.{name}.{key}": value for key, value in self.optimizer.state[parameter].items()}
        state["rates"] = torch.tensor(self.schedule.get_last_lr(), dtype=torch.float64)
        state["generator"] = torch.get_rng_state()
        return {name: value.detach().clone() for name, value in state.items()}


def train_finished(folder: Path) -> None:
    """Train with a spike and its rollback, go on to a later snapshot on disk, and end."""
    import sentinel

    training, rolled, states = Training(), list[int](), dict[int, dict[str, torch.Tensor]]()
    terms = sentinel.Rollback(every=EVERY, keep=4, margin=20, directory=folder / "snapshots", disk_every=1, disk_keep=1)
    monitor = sentinel.attach(training.model, training.optimizer, scheduler=training.schedule, rollback=terms)
    monitor.on_rollback(lambda *_: rolled.append(step))
    wait_until(lambda: monitor.state == "streaming")
    step = 0
    while step < STEPS or not rolled or step < rolled[-1] + STEPS - FAULT:
        training.step(corrupted=FAULT <= step < FAULT + LENGTH)
        if step % EVERY == 0:
            states[step] = training.list_state()
        time.sleep(0.002)
        step += 1
    monitor.detach()
    (snapshot,) = (folder / "snapshots").glob("step-*")
    torch.save(states[int(snapshot.name.removeprefix("step-"))], folder / "expected.pt")


def train_killed(folder: Path) -> None:
    """Train until a NaN loss, and wait to be killed while its incident is open."""
    import sentinel

    training = Training()
    monitor = sentinel.attach(training.model, training.optimizer)
    wait_until(lambda: monitor.state == "streaming")
    for step in range(BROKEN + 20):
        training.step(broken=step == BROKEN)
        time.sleep(0.002)
    signal.pause()


def train_recorded(folder: Path) -> None:
    """Train with a NaN loss, without a daemon."""
    import sentinel

    training = Training()
    with sentinel.attach(training.model, training.optimizer):
        for step in range(RECORDED):
            training.step(broken=step == RECORDED - 20)


class Tap:
    """Sits between a rank and its daemon, and records what each sends."""

    def __init__(self, daemon: Path, here: Path) -> None:
        self.heard = {"rank": bytearray(), "daemon": bytearray()}
        self._daemon, self._listener = daemon, socket.socket(socket.AF_UNIX)
        self._listener.bind(str(here))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        rank, _ = self._listener.accept()
        daemon = socket.socket(socket.AF_UNIX)
        daemon.connect(str(self._daemon))
        threading.Thread(target=self._pass_on, args=("daemon", daemon, rank), daemon=True).start()
        self._pass_on("rank", rank, daemon)

    def _pass_on(self, who: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                self.heard[who] += chunk
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def watched(task: str, folder: Path, kept: Path) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Run a daemon and its training; yield both processes, and keep what they sent to each other."""
    place = folder / task
    place.mkdir(mode=0o700)
    command = [sys.executable, "-m", "sentinel", "daemon", "--config", str(folder / "sentinel.toml"), "--directory"]
    daemon = subprocess.Popen([*command, str(place)])
    wait_until((place / "sentinel.sock").exists)
    tap = Tap(place / "sentinel.sock", place / "tap.sock")
    more = {"SENTINEL_ADDRESS": f"unix:{place}/tap.sock", "SENTINEL_RUN_ID": f"{task}-1", "SENTINEL_RUN": task}
    rank = subprocess.Popen([sys.executable, __file__, task, str(kept)], env={**os.environ, **more})
    try:
        yield daemon, rank
    finally:
        daemon.kill(), daemon.wait()
        rank.kill(), rank.wait()
    for who, heard in tap.heard.items():
        (kept / f"{task}.{who}").write_bytes(heard)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.02)


def is_waiting(history: Path) -> bool:
    """Return whether a message to the pager has failed, and steps and the rules' state are in the history."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"file:{history}?mode=ro", uri=True)) as database,
    ):
        entries = [msgspec.msgpack.decode(body) for (body,) in database.execute("SELECT body FROM outbox")]
        kept = database.execute("SELECT count(*) FROM states").fetchone()[0]
        (last,) = database.execute("SELECT max(last_seq) FROM chunks").fetchone()
        return bool(kept and last >= BROKEN + 10 and any(entry["attempts"] for entry in entries))
    return False


def describe_messages() -> bytes:
    """Return the fields of all messages, as a JSON schema."""
    from sentinel import wire

    _, components = msgspec.json.schema_components([*get_args(wire.FromRank), *get_args(wire.ToRank)])
    return msgspec.json.format(msgspec.json.encode(components))


def leave_out_index(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out SQLite's indexes of write-ahead logs, which are rebuilt when opened, and lock files."""
    return None if member.name.endswith(("-shm", ".lock")) else member


def make(archive: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        kept = folder / "kept"
        kept.mkdir()
        os.environ |= {"SENTINEL_STATE": str(kept / "state"), "SENTINEL_RUNTIME": str(folder / "run"), "PAGER": NOBODY}
        (folder / "sentinel.toml").write_text(SETTINGS)
        with watched("finished", folder, kept) as (daemon, rank):
            rank.wait(300)
            daemon.wait(60)
        with watched("killed", folder, kept):
            silence = ["silence", "LossSpike", "--run", "killed", "--for", "366d", "--comment", "new data"]
            subprocess.run([sys.executable, "-m", "sentinel", *silence], check=True)
            wait_until(lambda: is_waiting(kept / "state" / "runs" / "killed-1.sqlite"))
        recording = {**os.environ, "SENTINEL_RECORD": str(kept / "run.rec"), "SENTINEL_RUN": "recorded"}
        subprocess.run([sys.executable, __file__, "recorded", str(kept)], env=recording, check=True)
        (kept / "messages.json").write_bytes(describe_messages())
        with tarfile.open(archive, "w:xz") as file:
            file.add(kept, filter=leave_out_index, arcname=archive.name.removesuffix(".tar.xz"))


if __name__ == "__main__":
    tasks = {"finished": train_finished, "killed": train_killed, "recorded": train_recorded}
    if len(sys.argv) > 2:
        tasks[sys.argv[1]](Path(sys.argv[2]))
    else:
        make(Path(sys.argv[1]))
