"""A healthy DDP run on gloo in which one rank does something else after some steps, until a file appears.

    torchrun --nproc-per-node 2 waiting_ranks.py KIND FILE

Rank 1 is the one, rank 0 for `evaluation`. Prints `stalling` when it does.
"""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import sentinel

STEPS = 300
RELEASE = Path(sys.argv[2])


def tell() -> None:
    print("stalling", flush=True)


def wait_for_the_file() -> None:
    while not RELEASE.exists():
        time.sleep(0.05)


def hold_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def translate(model: torch.nn.Module) -> None:
    for _ in range(20):
        model(torch.randn(64, 16))


def score(model: torch.nn.Module) -> None:
    for _ in range(20):
        model(torch.randn(64, 16)).exp().mean()


def evaluate() -> None:
    other = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.LayerNorm(16))
    while not RELEASE.exists():
        translate(other)
        score(other)


def stall(kind: str, rank: int) -> None:
    if rank != (0 if kind == "evaluation" else 1):
        return
    tell()
    if kind == "user-code":
        wait_for_the_file()
    elif kind == "gil":
        hold_the_gil()
    elif kind == "mismatch":
        dist.broadcast(torch.zeros(3), src=1)
    elif kind == "evaluation":
        evaluate()
    elif kind == "killed":
        os.kill(os.getpid(), 9)


def main(kind: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "120"))))
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(model, optimizer, run="ranks")
    while monitor.state != "streaming":
        time.sleep(0.01)
    dist.barrier()
    rows = 8 * (STEPS - (100 if kind == "uneven" and rank == 1 else 0))
    for step, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(rows, 16)), batch_size=8)):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < STEPS // 2:
            time.sleep(0.01)  # so that the heartbeat has shown the loop at work before a rank stalls
        elif step == STEPS // 2:
            stall(kind, rank)
    if kind == "uneven" and rank == 1:
        tell()
        wait_for_the_file()
    dist.barrier()
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
