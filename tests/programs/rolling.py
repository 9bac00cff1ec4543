"""Ranks that wreck their weights, are rolled back, and are compared with a training in which that did not happen.

    torchrun --nproc-per-node N rolling.py DEED:WAY:FOLDER...

        train     trains until a snapshot from after the rollback is on disk
    resume    goes on from it, to the step at which `train` ended
    move      goes on from it with another number of ranks, for a few steps

WAY is `ddp`, `fsdp` or `hsdp` (replicas of two shards each). Each rank leaves FOLDER/DEED.WAY.RANK.json and, from
`train`, its state at the end; the first rank also the whole state at the snapshot.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sentinel
from sentinel.hooks.snapshot import directory

RULES = """
group: rolling
signals: {broken: what the run says of itself}
rules:
  - alert: Broken
    expr: broken > 0
    actions: [rollback]
    annotations: {summary: "broken"}
"""
EVERY = 10
FAULT = 25
AFTER = 8
"""Least number of steps after the rollback that are compared."""
WRITTEN = 85
"""About the step at which the first snapshot goes to disk: none is taken within 50 steps of an alert."""


class Training:
    """A training whose state is hard to restore.

    Dropout draws from the generator, BatchNorm has buffers of each rank, 31 rows split unevenly over ranks, and one row
    leaves most ranks an empty part.
    """

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(6, 31), nn.BatchNorm1d(31), nn.GELU(), nn.Dropout(0.1), nn.Linear(31, 31), nn.Linear(31, 1)
        )
        self.rank = dist.get_rank()
        if way == "ddp":
            self.net: nn.Module = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
        else:
            world = dist.get_world_size()
            if way == "fsdp":
                mesh = init_device_mesh("cpu", (world,))
            else:
                mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(net[4], mesh=mesh)  # the rest is in the root's group: each makes three collectives per step
            self.net = fully_shard(net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=500)
        torch.manual_seed(100 + self.rank)

    def step(self, step: int, wrecked: bool = False) -> None:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        batch = torch.randn(8, 6, generator=generator) * (1000 if wrecked else 1)
        self.optimizer.zero_grad()
        (self.net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> list[torch.Tensor]:
        """Return this rank's part of the state, all of which must be the same as without the rollback."""
        tensors: list[Any] = [*self.net.parameters(), *self.net.buffers()]
        tensors += [value for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        tensors += [torch.tensor(self.schedule.get_last_lr()), torch.get_rng_state()]
        return [getattr(t, "_local_tensor", t).detach().clone() for t in tensors]

    def whole(self) -> list[torch.Tensor]:
        """Return the whole state that does not depend on the number of ranks. All ranks must call it."""
        tensors: list[Any] = list(self.net.parameters())
        tensors += [value for p in self.net.parameters() for value in self.optimizer.state[p].values()]
        tensors += [torch.tensor(self.schedule.get_last_lr())]
        return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in tensors]


def attached(training: Training, folder: Path, way: str, step: int) -> sentinel.Monitor:
    terms = sentinel.Rollback(every=EVERY, keep=3, margin=5, directory=folder / f"{way}-snapshots", disk_every=1)
    monitor = sentinel.attach(training.net, training.optimizer, run=way, rollback=terms, step=step)
    deadline = time.monotonic() + 60
    while monitor.state != "streaming" and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    return monitor


def everywhere(flag: bool) -> bool:
    """Return rank 0's flag on all ranks."""
    tensor = torch.tensor([int(flag)])
    dist.broadcast(tensor, 0)
    return bool(tensor.item())


def train(folder: Path, way: str) -> dict[str, Any]:
    training = Training(way)
    monitor = attached(training, folder, way, 0)
    rolled: list[tuple[int, int]] = []
    monitor.on_rollback(lambda to, at: rolled.append((to, at)))
    whole: dict[int, list[torch.Tensor]] = {}
    step = 0
    while True:
        wrecked = step >= FAULT and not rolled
        monitor.log(broken=float(step == FAULT))
        training.step(step, wrecked)
        if step % EVERY == 0:
            whole[step] = training.whole()
        late = bool(rolled) and step >= rolled[0][1] + AFTER
        steps = directory.steps(folder / f"{way}-snapshots")
        if late and everywhere(bool(steps) and steps[-1] > rolled[0][1]):
            break
        time.sleep(0.1 if step > WRITTEN else 0.005)  # the writer has a lower priority than the loop
        step += 1
    monitor.detach()
    torch.save(training.state(), folder / f"{way}.{training.rank}.pt")
    if training.rank == 0:
        torch.save(whole[directory.steps(folder / f"{way}-snapshots")[-1]], folder / f"{way}.whole.pt")
    (to, at) = rolled[0]
    reference = Training(way)
    for other in (*range(to + 1), *range(at + 1, step + 1)):
        reference.step(other)
    same = all(torch.equal(one, other) for one, other in zip(training.state(), reference.state(), strict=True))
    return {"rolled": rolled, "same": same, "end": step}


def resume(folder: Path, way: str) -> dict[str, Any]:
    training = Training(way)
    for step in range(3):  # so that the state is not that of the snapshot
        training.step(step)
    step = sentinel.resume(training.net, training.optimizer, directory=folder / f"{way}-snapshots")
    end = json.loads((folder / f"train.{way}.{training.rank}.json").read_text())["end"]
    for other in range(step, end + 1):
        training.step(other)
    before = torch.load(folder / f"{way}.{training.rank}.pt")
    same = all(torch.equal(one, other) for one, other in zip(training.state(), before, strict=True))
    return {"resumed": step, "same": same, "end": end}


def move(folder: Path, way: str) -> dict[str, Any]:
    training = Training(way)
    for step in range(3):  # so that the state is not that of the snapshot
        training.step(step)
    step = sentinel.resume(training.net, training.optimizer, directory=folder / f"{way}-snapshots")
    whole = torch.load(folder / f"{way}.whole.pt")
    same = all(torch.equal(one, other) for one, other in zip(training.whole(), whole, strict=True))
    drawn = torch.rand(1).item()
    for other in range(step, step + 3):
        training.step(other)
    weights = float(sum(tensor.sum() for tensor in training.whole()))
    return {"resumed": step, "same": same, "drawn": drawn, "weights": weights}


def main() -> None:
    dist.init_process_group("gloo")
    for task in sys.argv[1:]:
        deed, way, folder = task.split(":", 2)
        result = {"train": train, "resume": resume, "move": move}[deed](Path(folder), way)
        dist.barrier()
        (Path(folder) / f"{deed}.{way}.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
