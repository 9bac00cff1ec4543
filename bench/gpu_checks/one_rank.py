"""Trains one rank on NCCL (on the CPU: gloo) for nccl.py: flight recorder, rollback by the daemon, then a long wait.

torchrun --nproc-per-node 1 -m bench.gpu_checks.one_rank DEVICE ddp|fsdp
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
from bench.gpu_checks.loops import Loop, settle, toy
from sentinel.hooks.torch_interop import internals

STEPS = 20
HANG_SECONDS, START_SECONDS = 45, 15
CYCLES_A_SECOND = 2_000_000_000


def wait_for_the_device(device: str) -> None:
    """Wait for a kernel of `HANG_SECONDS`, and then as long again; on the CPU only sleep."""
    if device == "cuda":
        torch.cuda._sleep(HANG_SECONDS * CYCLES_A_SECOND)
        float(torch.ones(1, device=device))
    time.sleep(HANG_SECONDS)


def main() -> None:
    device, way = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    loop = Loop(device, **toy(device))
    if way == "ddp":
        loop.model = DistributedDataParallel(loop.model, device_ids=[0] if device == "cuda" else None)
    else:
        mesh = init_device_mesh(device, (1,))
        for block in (*loop.model.blocks.layers, loop.model):
            fully_shard(block, mesh=mesh)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), 1e-4)
    monitor = sentinel.attach(loop.model, loop.optimizer, rollback=sentinel.Rollback(every=5, keep=2, margin=5))
    hangs: list[bool] = []
    # The wait is inside the loop: a rank that has left its loop does not count as hung.
    loop.optimizer.register_step_pre_hook(lambda *_: wait_for_the_device(device) if hangs else None)
    loop.run(STEPS)
    found = read_record(device, monitor)
    print(json.dumps(found | await_rollback(loop, monitor)), flush=True)
    hangs += [True] * (way == "ddp")
    _steps(loop, 1)
    monitor.detach()
    dist.destroy_process_group()


def await_rollback(loop: Loop, monitor: sentinel.Monitor) -> dict[str, Any]:
    """Break a weight, and train until the daemon has rolled the run back; return what happened."""
    done: list[tuple[int, int]] = []
    monitor.on_rollback(lambda to, at: done.append((to, at)))
    _steps(loop, 40)
    broken, until = loop.steps, time.monotonic() + START_SECONDS
    with torch.no_grad():
        parameter = next(iter(loop.model.parameters()))
        getattr(parameter, "_local_tensor", parameter)[:] = torch.nan
    while not done and time.monotonic() < until:
        _steps(loop, 1)
    _steps(loop, 2)
    return {"broken": broken, "rolled back": done, "loss": float(loop.losses[-1])}


def _steps(loop: Loop, count: int) -> None:
    """Make steps, with pauses for the daemon, which gets them twice a second."""
    for _ in range(count):
        loop.step()
        time.sleep(0.02)


def read_record(device: str, monitor: sentinel.Monitor) -> dict[str, Any]:
    """Return what Sentinel knows of the process group, once it is connected to its daemon."""
    settle(device)
    until = time.monotonic() + START_SECONDS
    while monitor.state != "streaming" and time.monotonic() < until:
        time.sleep(0.05)
    flight = internals.read_flight_record()
    return {
        "groups": {name: [group.enqueued, list(group.ranks)] for name, group in flight.groups.items()},
        "operations": sorted({one.op for one in flight.collectives}),
        "timeout": internals.default_group_seconds(),
        "state": monitor.state,
    }


if __name__ == "__main__":
    main()
