"""Trains under FSDP2 without clipping: each rank has the norm of its own shards, and the script logs the whole norm.

    torchrun --nnodes N sharded_norm.py FILE

Trains until FILE is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sentinel

LIMIT = 20_000
"""Most steps."""


def norm_of_all(net: nn.Module) -> float:
    shards = [p.grad.to_local() for p in net.parameters() if isinstance(p.grad, DTensor)]
    squares = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())


def main() -> None:
    file = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = fully_shard(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    monitor = sentinel.attach(net, optimizer, run="sharded")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(LIMIT):
        optimizer.zero_grad()
        (net(torch.randn(8, 16, generator=generator)) - 1.0).square().mean().backward()
        monitor.log(whole_norm=norm_of_all(net))
        optimizer.step()
        there = torch.tensor(float(file.exists()))
        dist.all_reduce(there)
        if there:
            break
        time.sleep(0.05)
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
