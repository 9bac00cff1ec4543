"""Ranks that take snapshots of their own part of the state, go on, and restore it, from memory and from disk.

    torchrun --nproc-per-node 2 sharded_state.py FOLDER WAY...      leaves FOLDER/WAY.RANK.json

WAY is `zero` (ZeroRedundancyOptimizer under DDP) or `fsdp`. A profiler records while a snapshot is taken.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from sentinel.hooks.snapshot import checkpoint_files
from sentinel.hooks.snapshot.parts import RunState
from sentinel.hooks.snapshot.snapshot import Snapshot, put_back
from sentinel.hooks.snapshot.state_owners import Owners

NEVER = ("c10d", "gloo", "all_gather", "allgather", "all_reduce", "allreduce", "broadcast")
"""Parts of the names of operations that send to other ranks, of which a snapshot must use none."""


class Training:
    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 31), nn.GELU(), nn.Linear(31, 1))
        self.optimizer: Any
        if way == "zero":
            self.net: nn.Module = nn.parallel.DistributedDataParallel(net)
            self.optimizer = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.AdamW, lr=1e-2)
            self.inner = self.optimizer.optim
        else:
            self.net = fully_shard(net)
            self.inner = self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.run = RunState([self.net], [self.optimizer], Owners([self.net], [self.optimizer]), {})

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
            self.optimizer.zero_grad()
            self.net(batch).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> list[torch.Tensor]:
        tensors: list[Any] = list(self.net.parameters())
        tensors += [value for p in self.net.parameters() for value in self.inner.state.get(p, {}).values()]
        tensors += [torch.tensor(group["lr"]) for one in (self.optimizer, self.inner) for group in one.param_groups]
        return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in tensors]


def check(folder: Path, way: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    training, snapshot = Training(way), Snapshot()
    training.steps(0, 4)
    training.run.check_models()
    training.run.check_optimizers()
    with torch.profiler.profile() as profile:
        training.run.refresh()
        snapshot.take(4, training.run.parts, lambda nbytes: None)
        snapshot.copy()
        snapshot.finish(training.run.parts, lambda nbytes: None)
    snapshot.seal()
    snapshot.release()
    seen = sorted({event.key for event in profile.key_averages() if any(name in event.key for name in NEVER)})
    place = folder / f"{way}-step"
    checkpoint_files.write(
        place, snapshot.export_named(training.run.parts), rank=rank, ranks=range(world), world=world,
        wanted=lambda: True,
    )  # fmt: skip
    if rank == 0:
        checkpoint_files.assemble(place, range(world), lambda: True)
    training.steps(4, 8)
    expected = training.state()
    training.steps(8, 12)
    snapshot.restore(training.run.parts)
    training.steps(4, 8)
    memory = all(map(torch.equal, training.state(), expected))
    dist.barrier()
    again = Training(way)
    named = checkpoint_files.load(place, rank, again.run.weights.by_name())
    put_back(again.run.parts, {part.name: part.import_named(named[part.name]) for part in again.run.parts})
    again.steps(4, 8)
    disk = all(map(torch.equal, again.state(), expected))
    return {"memory": memory, "disk": disk, "seen": seen, "tensors": len(expected)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    target, *ways = sys.argv[1:]
    for each in ways:
        result = check(Path(target), each)
        (Path(target) / f"{each}.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    time.sleep(0.5)  # otherwise gloo may abort
    dist.destroy_process_group()
