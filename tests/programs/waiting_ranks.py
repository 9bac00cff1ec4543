"""A healthy DDP run on gloo in which one rank does something else half-way.

    torchrun --nproc-per-node 2 waiting_ranks.py KIND FILE [SECONDS] [ROUNDS]

That rank is the last; with `node-drift`, all ranks of the last node; for work that takes long for a good reason, the
first rank, or with `turns` all ranks, each with other work. It then prints `stalling` and hangs until FILE.0 exists, in
the next round until FILE.1 does. Work that takes long for a good reason takes SECONDS, and needs no file.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel.hooks.core import governor

STEPS = 300
SHORTER = 100
"""Batches by which the last rank's loader is shorter, where that is the fault."""
RELEASE = Path(sys.argv[2])
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
ROUNDS = int(sys.argv[4]) if len(sys.argv) > 4 else 1
CHECKSUM_STEPS = 16
HELD_SECONDS = 9
"""Seconds for which the GIL is held: it is reported after 5."""
SLOT_STEPS = 10


def tell() -> None:
    sys.stdout.write("stalling\n")  # one write: unbuffered, as under torchrun, print() writes the newline separately
    sys.stdout.flush()


def wait_for_the_file() -> None:
    released = RELEASE.with_suffix(f".{len(_stalled)}")
    while not released.exists():
        time.sleep(0.05)
    _stalled.append(released)


_stalled: list[Path] = []
"""Release files of the rounds that are over."""


# Faults: ranks that hang, die or do something wrong.


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lambda: (wait_for_the_file(), lock.release()), daemon=True).start()
    with lock:
        pass


def hold_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def hold_the_gil_for_a_while() -> None:
    with subprocess.Popen(["sleep", str(HELD_SECONDS)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        ctypes.PyDLL(None).read(other.stdout.fileno(), ctypes.create_string_buffer(1), 1)
    wait_for_the_file()


def issue_another_collective() -> None:
    dist.broadcast(torch.zeros(3), src=dist.get_rank())


def lose_a_signal() -> None:
    os.kill(os.getpid(), 9)


def crash() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


_pairs: list[dist.ProcessGroup] = []
"""Process groups of each rank, except the last, with the next rank."""


def wait_in_a_chain(rank: int) -> None:
    """Make each rank wait for the next one, and only the last for the file."""
    if rank == len(_pairs):
        tell()
        wait_for_the_file()
    for pair in (rank, rank - 1):
        if 0 <= pair < len(_pairs):
            dist.barrier(group=_pairs[pair])


def wait_in_a_circle(rank: int) -> None:
    """Make the last two ranks issue two collectives in opposite order."""
    if rank == len(_pairs):
        tell()
        dist.barrier()
    if rank >= len(_pairs) - 1:
        dist.barrier(group=_pairs[-1])
    if rank < len(_pairs):
        dist.barrier()


# Work that takes long for a good reason.


def translate(model: nn.Module) -> None:
    for _ in range(20):
        model(torch.randn(64, 16))


def score(model: nn.Module) -> None:
    for _ in range(20):
        model(torch.randn(64, 16)).exp().mean()


def evaluate() -> None:
    other = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        translate(other)
        score(other)


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SECONDS)
        return x * 2


def export() -> None:
    torch.export.export(Slow(), (torch.randn(2),), strict=False)


def write_a_checkpoint() -> None:
    class SlowDisk:
        def write(self, data: bytes) -> int:
            if len(data) > 4096:
                time.sleep(SECONDS)
            return len(data)

        def flush(self) -> None:
            pass

    torch.save({"weights": torch.randn(4096)}, SlowDisk())  # type: ignore[arg-type]


def recompile() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(SECONDS)
        return graph.forward

    torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.randn(3))


def declared(monitor: sentinel.Monitor) -> None:
    with monitor.phase("validation"):
        time.sleep(SECONDS)


STUCK = (wait_for_the_file, wait_for_a_lock, hold_the_gil_for_a_while)
"""How the last rank hangs with `stuck`: one way for each round."""
HANGS = {
    "user-code": wait_for_the_file,
    "lock": wait_for_a_lock,
    "gil": hold_the_gil,
    "mismatch": issue_another_collective,
    "killed": lose_a_signal,
    "crash": crash,
    "exit": leave,
}
LONG = (evaluate, export, write_a_checkpoint, recompile)
TURNS = len(LONG) + 2
"""Number of situations of `take_turns`: those of `LONG`, a declared phase, and none."""


def half_way(kind: str, number: int, monitor: sentinel.Monitor, model: nn.Module) -> None:
    rank = dist.get_rank()
    if kind == "long" and rank == 0:
        for situation in (*LONG, lambda: declared(monitor)):
            tell()
            situation()
    elif kind == "evaluation" and rank == 0:
        tell()
        evaluate()
    elif (kind == "drift" and rank == dist.get_world_size() - 1) or (kind == "node-drift" and is_on_last_node()):
        tell()
        with torch.no_grad():
            model.get_parameter("module.2.weight")[0, 3] += 0.5
    elif kind == "chain":
        wait_in_a_chain(rank)
    elif kind == "circle":
        wait_in_a_circle(rank)
    elif kind == "stuck" and rank == dist.get_world_size() - 1:
        tell()
        STUCK[number % len(STUCK)]()
    elif kind in HANGS and rank == dist.get_world_size() - 1:
        tell()
        HANGS[kind]()


def is_on_last_node() -> bool:
    return dist.get_rank() >= dist.get_world_size() - int(os.environ["LOCAL_WORLD_SIZE"])


def take_turns(slot: int, monitor: sentinel.Monitor) -> None:
    """Put each rank into a situation of its own; the rank whose situation is none waits for the others."""
    if dist.get_rank() == 0:
        tell()
    situation = (slot + dist.get_rank()) % TURNS
    if situation < len(LONG):
        LONG[situation]()
    elif situation == len(LONG):
        declared(monitor)


def once(kind: str, number: int, monitor: sentinel.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one epoch. Batch norm's buffers are each rank's own, as their data are."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    rows = STEPS - (SHORTER if kind == "uneven" and rank == last else 0)
    data = torch.randn(8 * rows, 16, generator=torch.Generator().manual_seed(rank))
    for step, (x,) in enumerate(DataLoader(TensorDataset(data), batch_size=8)):
        train(model, optimizer, x)
        if step < STEPS // 2 or "drift" in kind:
            time.sleep(0.01)  # so that the heartbeat has shown the loop at work before a rank stalls
        if step == STEPS // 2:
            half_way(kind, number, monitor, model)
        slot, rest = divmod(step - STEPS // 2, SLOT_STEPS)
        if kind == "turns" and not rest and 0 <= slot < TURNS:
            take_turns(slot, monitor)
    if kind == "uneven" and rank == last:
        tell()
        wait_for_the_file()
        for _ in range(SHORTER):
            train(model, optimizer, torch.randn(8, 16))
    if kind == "drift" and number + 1 < ROUNDS:
        if rank == last:
            wait_for_the_file()
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(kind: str) -> None:
    governor.FIRST, governor.RARE = {**governor.FIRST, 3: CHECKSUM_STEPS}, range(CHECKSUM_STEPS, CHECKSUM_STEPS + 1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "120"))))
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)), broadcast_buffers=False
    )
    if kind in ("chain", "circle"):
        _pairs.extend(dist.new_group([each, each + 1]) for each in range(dist.get_world_size() - 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(model, optimizer, run="ranks", overhead=1.0)
    while monitor.state != "streaming":
        time.sleep(0.01)
    dist.barrier()
    for number in range(ROUNDS):
        once(kind, number, monitor, model, optimizer)
    if kind == "turns" or (kind == "long" and rank == 0):
        if rank == 0:
            tell()
        time.sleep(SECONDS)  # after the loop
    dist.barrier()
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
