"""A custom training loop under FSDP2; one call attaches Sentinel on every rank. Norms are combined from the shards.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sentinel


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs[:, :4].sin().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data, seed=0, drop_last=True))
    with sentinel.attach(model, optimizer, loader=loader, run="fsdp2_loop"):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
