"""Two ranks that train a large model on next to nothing: each step is the reduction of its gradients.

torchrun --nproc-per-node 2 reducing.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

import sentinel

STEPS = 12
WIDTH = 2048


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    with sentinel.attach(net, optimizer, run="reducing"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(1, WIDTH)).square().mean().backward()
            optimizer.step()
    dist.barrier()
    time.sleep(0.5)  # gloo aborts at once after a barrier, now and then (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
