"""Trains four healthy ranks on gloo; for each way of spreading the model one rank is slow from some step on.

torchrun --nproc-per-node 4 straggling.py        attempts of one run, one after the other: the ways below
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sentinel

HEALTHY, SLOW = 80, 60
STEP_SECONDS = 0.03
LATE_SECONDS = 0.04
WAYS = ("ddp forward", "ddp data", "fsdp data")
STRAGGLERS = {"ddp forward": 2, "ddp data": 1, "fsdp data": 3}


class Rows(Dataset[torch.Tensor]):
    """Rows, one per batch; on the straggler (`late`) they come late from row HEALTHY on."""

    def __init__(self, late: bool) -> None:
        self._late = late

    def __len__(self) -> int:
        return HEALTHY + SLOW

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._late and index >= HEALTHY:
            time.sleep(LATE_SECONDS)
        return torch.randn(16)


class Layer(nn.Linear):
    """A layer that sleeps in its forward pass: it takes time as a large one would, but no CPU."""

    late = False
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(STEP_SECONDS + LATE_SECONDS * (self.late and self.calls > HEALTHY))
        return super().forward(x)


def spread(way: str, straggles: bool) -> nn.Module:
    layer = Layer(16, 16)
    layer.late = straggles and way.endswith("forward")
    net = nn.Sequential(layer, nn.Linear(16, 1))
    if way.startswith("ddp"):
        return DistributedDataParallel(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def train(way: str) -> None:
    straggles = dist.get_rank() == STRAGGLERS[way]
    model = spread(way, straggles)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows: DataLoader[Any] = DataLoader(Rows(straggles and way.endswith("data")))
    with sentinel.attach(model, optimizer, run="straggling") as monitor:
        while monitor.state != "streaming":
            time.sleep(0.01)
        dist.barrier()
        for x in rows:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for way in WAYS:
        train(way)
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
