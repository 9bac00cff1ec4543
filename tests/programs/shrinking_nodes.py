"""Ranks on several nodes that train until a node is lost, and then resume from disk on the nodes that are left.

    sentinel run --allow-shrink MIN -- torchrun --nnodes={nodes} ... shrinking_nodes.py FOLDER

Each rank adds a digest of its weights after each step to FOLDER/weights.RANK, and leaves FOLDER/RANK.json. Remaining
ranks make FOLDER/left.RANK when they go on, and end once there is FOLDER/end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import sentinel
from tests.programs.rolling import Training

EVERY, AFTER = 10, 30
LIMIT = 10_000
"""Most steps of the first start, which does not end by itself."""


def digest(training: Training) -> str:
    """Return a digest of the weights' bits."""
    bits = b"".join(one.detach().numpy().tobytes() for one in training.net.parameters())
    return hashlib.sha256(bits).hexdigest()


def is_end_wanted(folder: Path) -> bool:
    """Return whether all ranks see FOLDER/end."""
    seen = torch.tensor(float((folder / "end").exists()))
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    return bool(seen)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, place = dist.get_rank(), folder / "snapshots"
    training = Training("ddp")
    start = sentinel.resume(training.net, training.optimizer, directory=place)
    began = digest(training)
    terms = sentinel.Rollback(every=EVERY, keep=4, margin=5, directory=place, disk_every=1)
    monitor = sentinel.attach(training.net, training.optimizer, run="shrinking", rollback=terms, step=start)
    if start:
        (folder / f"left.{rank}").touch()
    end = start
    with (folder / f"weights.{rank}").open("a", buffering=1) as log:
        while end < LIMIT and not (start and end >= start + AFTER and is_end_wanted(folder)):
            training.step(end)
            log.write(f"{end} {digest(training)}\n")
            time.sleep(0.05)  # gives time to write a snapshot before it is overwritten
            end += 1
    said = {
        "start": start, "began": began, "end": end, "world": dist.get_world_size(), "ended": digest(training),
        "node": [os.environ[name] for name in ("SENTINEL_NODES", "SENTINEL_NODE_RANK", "SENTINEL_NODE")],
    }  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
