"""A small training, alone or as ranks of torchrun, that saves, resumes, and breaks at step 230 or at BREAKS_AT.

breaking.py FOLDER FAULT [always] [ours]

FAULT is `hang`, `sleep`, `exit`, `kill`, `oom`, `nan` or `none`; without `always` it comes once. It saves and resumes
by its own code; with `ours` by sentinel.Rollback(directory=) and sentinel.resume, without rollbacks in memory.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import sentinel
from sentinel.hooks.snapshot.directory import MANIFEST

STEPS, EVERY = 400, 50
BREAKS_AT = int(os.environ.get("BREAKS_AT", "230"))


def restored(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that may be used; return the step to begin at."""
    before = int(os.environ.get("SENTINEL_RESUME_BEFORE", STEPS))
    start = max((step for path in folder.glob("*.pt") if (step := int(path.stem)) <= before), default=0)
    if start:
        state = torch.load(folder / f"{start}.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    return start


def save(folder: Path, step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    draft = folder / "draft"
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, draft)
    draft.replace(folder / f"{step}.pt")


def break_down(fault: str) -> None:
    match fault:
        case "hang":
            lock = threading.Lock()
            with lock, lock:  # unlike a sleep, it never ends
                pass
        case "sleep":
            time.sleep(3600)
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def main() -> None:
    folder, fault, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    rank, ranks, ours = int(os.environ.get("RANK", 0)), "RANK" in os.environ, "ours" in words
    torch.manual_seed(0)
    inner = net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if ranks:
        dist.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)  # type: ignore[assignment]
    rollback, snapshots = None, folder / "snapshots"
    if ours:
        start = sentinel.resume(net, optimizer, directory=snapshots)
        rollback = sentinel.Rollback(
            every=25, keep=3, margin=25, budget=0, directory=snapshots, disk_every=1, disk_keep=4
        )
    else:
        start = restored(folder, inner, optimizer)
    with (folder / f"starts.{rank}").open("a") as log:
        print(os.environ.get("SENTINEL_ATTEMPT", "0"), start, file=log)
    sentinel.attach(net, optimizer, step=start, rollback=rollback)
    once = folder / f"broken.{rank}"
    for step in range(start, STEPS):
        if step % EVERY == 0 and step > start and rank == 0 and not ours:
            save(folder, step, inner, optimizer)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        if step == BREAKS_AT and rank == ranks and ("always" in words or not once.exists()):
            once.touch()
            if fault == "nan":
                x[0, 0] = float("nan")
            else:
                break_down(fault)
        optimizer.zero_grad()
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        has_one = not ours or any(snapshots.rglob(MANIFEST))
        time.sleep(0.01 if has_one else 0.05)  # so that the daemon, and a snapshot on disk, are there before the fault
    sys.stdout.write("complete\n")  # one write: unbuffered, as under torchrun, print() writes the newline separately
    sys.stdout.flush()
    if ranks:
        dist.barrier()
        time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
