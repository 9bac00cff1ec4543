"""Trains two ranks on gloo, first under DDP, then under FSDP2; rank 1 gets a batch with a NaN at step 40.

torchrun --nproc-per-node 2 poisoned_ranks.py        runs `poisoned ddp` and `poisoned fsdp`
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sentinel

STEPS, AT = 45, 40
WAYS = ("ddp", "fsdp")


def spread(way: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if way == "ddp":
        return DistributedDataParallel(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def train(way: str) -> None:
    torch.manual_seed(0)
    model = spread(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    with sentinel.attach(model, optimizer, run=f"poisoned {way}") as monitor:
        while monitor.state != "streaming":
            time.sleep(0.01)
        dist.barrier()
        for step in range(STEPS):
            x, y = torch.randn(8, 16), torch.randint(4, (8,))
            if step == AT and dist.get_rank() == 1:
                x[0, 0] = torch.nan
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for way in WAYS:
        train(way)
    time.sleep(0.5)  # gloo sometimes aborts if destroyed right after a barrier (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
