"""One rank on NCCL (on the CPU: gloo): what the process group's recorder has, then a wait for the device that lasts.

torchrun --nproc-per-node 1 one_rank.py DEVICE ddp|fsdp
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sentinel
from gpu_checks.loops import Loop, settle, toy
from sentinel.hooks import collectives
from sentinel.hooks.tally import Ledger

STEPS = 20
HANG_SECONDS, START_SECONDS = 45, 15
CYCLES_A_SECOND = 2_000_000_000


def wait_for_the_device(device: str) -> None:
    """For a kernel that does not end; on the CPU for nothing."""
    if device == "cuda":
        torch.cuda._sleep(HANG_SECONDS * CYCLES_A_SECOND)  # type: ignore[attr-defined]
        float(torch.ones(1, device=device))
    time.sleep(HANG_SECONDS)


def main() -> None:
    device, way = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    loop = Loop(device, **toy(device))
    if way == "ddp":
        loop.model = DistributedDataParallel(loop.model, device_ids=[0] if device == "cuda" else None)  # type: ignore[assignment]
    else:
        mesh = init_device_mesh(device, (1,))
        for block in (*loop.model.blocks.layers, loop.model):
            fully_shard(block, mesh=mesh)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), 1e-4)
    monitor = sentinel.attach(loop.model, loop.optimizer)

    def look(*_: object) -> None:
        """In the loop: who has left it does not hang."""
        if loop.steps == STEPS:
            print(json.dumps(recorded(device, monitor)), flush=True)
            if way == "ddp":
                wait_for_the_device(device)

    loop.optimizer.register_step_pre_hook(look)
    loop.run(STEPS + 1)
    monitor.detach()
    dist.destroy_process_group()


def recorded(device: str, monitor: sentinel.Monitor) -> dict[str, Any]:
    """What Sentinel knows of the process group, once it has found its daemon."""
    settle(device)
    until = time.monotonic() + START_SECONDS
    while monitor.state != "streaming" and time.monotonic() < until:
        time.sleep(0.05)
    flight = collectives.recorded(Ledger())
    return {
        "groups": {name: [group.enqueued, list(group.ranks)] for name, group in flight.groups.items()},
        "operations": sorted({one.op for one in flight.collectives}),
        "timeout": collectives.timeout_seconds(),
        "state": monitor.state,
    }


if __name__ == "__main__":
    main()
