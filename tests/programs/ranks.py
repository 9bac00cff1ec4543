"""Ranks of torchrun that train with and without Sentinel, recorded, for each way of spreading a model over ranks.

torchrun --nproc-per-node 2 ranks.py FOLDER WAY...     each rank writes FOLDER/WAY.RANK.json for each way
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import sentinel
from sentinel.hooks.core import governor

STEPS = 4
ROWS = 8
CLIP = 0.5
LEARNING_RATE = 0.05


def model() -> nn.Sequential:
    """Return a model whose layers of 31 rows split unevenly; the layer of one row leaves rank 1 an empty shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 31), nn.GELU(), nn.LayerNorm(31), nn.Linear(31, 31), nn.Tanh(), nn.Linear(31, 1))


def batches() -> list[torch.Tensor]:
    """Return batches of shape (ROWS, 6), of which every rank takes its part."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 6, generator=generator) for _ in range(STEPS)]


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = net(batch)
    return (output - batch.sum(1, keepdim=True)).square().mean()


def spread(way: str) -> nn.Module:
    """Return the model spread over the ranks.

    `ddp`, `ddp-inner` (whose inner module is attached), `fsdp`, `hsdp` (replicas of shards), each with `-clip` or
    without. `fsdp1`, `fsdp1-flat`: the older FSDP.
    """
    net, kind = model(), way.removesuffix("-clip")
    if kind.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(net)
    if kind.startswith("fsdp1"):
        return FullyShardedDataParallel(net, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu"))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        for layer in (net[0], net[5]):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh)
    return net


def collectives() -> int:
    """Return the number of collectives that this process has begun."""
    return len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"])


def train(way: str, watched: bool) -> tuple[list[torch.Tensor], int]:
    """Train; return (this rank's weights and last gradients, number of collectives in the steps)."""
    net = spread(way)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    attached = net.module if way == "ddp-inner" else net
    monitor = sentinel.attach(attached, optimizer, run=way) if watched else None
    before = collectives()
    rank = dist.get_rank()
    for batch in batches():
        optimizer.zero_grad()
        loss_of(net, batch[rank * ROWS // 2 : (rank + 1) * ROWS // 2]).backward()
        if way.endswith("-clip"):
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
    taken = collectives() - before
    if monitor is not None:
        monitor.detach()
    tensors: list[Any] = [t for p in net.parameters() for t in (p.detach(), p.grad) if t is not None]
    return [getattr(tensor, "_local_tensor", tensor).clone() for tensor in tensors], taken


def main() -> None:
    governor.FIRST = dict.fromkeys(governor.FIRST, 1)
    governor.DECISIONS = (50,)
    dist.init_process_group("gloo")
    folder, ways = Path(sys.argv[1]), sys.argv[2:]
    for way in ways:
        os.environ["SENTINEL_RECORD"] = str(folder / way)
        (bare, without), (weights, taken) = train(way, watched=False), train(way, watched=True)
        same = all(torch.equal(one, other) for one, other in zip(bare, weights, strict=True))
        (folder / f"{way}.{dist.get_rank()}.json").write_text(
            json.dumps({"same": same, "bare": without, "watched": taken})
        )
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
