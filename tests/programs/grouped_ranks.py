"""Runs four ranks on gloo in groups; one does something else, and each writes its flight record once all wait.

torchrun --nproc-per-node 4 grouped_ranks.py KIND FOLDER
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FOLDER = Path(sys.argv[2])
STEPS = 5
STILL = 20
"""Number of looks in a row, a tenth of a second apart, at which the record must be the same."""


def write_record() -> None:
    """Write the flight record once nothing moves any more; then wait for the other ranks' records, and exit."""
    record, looks = b"", 0
    while looks < STILL:
        time.sleep(0.1)
        now = torch._C._distributed_c10d._dump_fr_trace_json()
        record, looks = now, looks + 1 if now == record and _begun.is_set() else 0
    rank = dist.get_rank()
    (FOLDER / f"{rank}.part").write_bytes(record)
    (FOLDER / f"{rank}.part").rename(FOLDER / f"trace_rank_{rank}.json")
    while len(list(FOLDER.glob("trace_rank_*.json"))) < dist.get_world_size():
        time.sleep(0.1)
    os._exit(0)


_begun = threading.Event()
"""Set once all groups are made and used."""


def stand() -> None:
    threading.Event().wait()


def chain(rank: int) -> None:
    """Rank 3 is in its own code, 2 waits for it, 1 for 2, 0 for 1."""
    if rank == 3:
        stand()
    for pair in (rank, rank - 1):
        if 0 <= pair < 3:
            dist.barrier(group=_pairs[pair])


def circle(rank: int) -> None:
    """Ranks 1 and 2 issue two collectives in opposite order."""
    both: list[Callable[[], object]] = [lambda: dist.barrier(group=_pairs[1]), dist.barrier]
    for each in (reversed(both) if rank == 1 else both) if rank in (1, 2) else both[1:]:
        each()


def mesh(rank: int) -> None:
    """Rank 3 does not come to an all_reduce over the axis `dp`; the others wait there, or in the next step."""
    for step in range(STEPS):
        dist.all_reduce(torch.ones(6), group=_mesh.get_group("tp"))
        if rank == 3 and step == 3:
            stand()
        dist.all_reduce(torch.ones(4, 2), group=_mesh.get_group("dp"))


def transfer(rank: int) -> None:
    """Rank 1 waits for data that rank 0 never sends, and the others for rank 1. Rank 0 has left its loop."""
    if rank == 0:
        stand()
    if rank == 1:
        dist.recv(torch.ones(3), src=0)
    dist.barrier(group=_last)


def gather(rank: int) -> None:
    """Rank 2 takes itself for the root of a gather."""
    root = 2 if rank == 2 else 0
    lists = [torch.ones(3) for _ in range(4)] if rank == root else None
    dist.gather(torch.ones(3), lists, dst=root)
    dist.barrier()


def healthy(rank: int) -> None:
    mesh(-1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _pairs = [dist.new_group([rank, rank + 1]) for rank in range(3)]
    _last = dist.new_group([1, 2, 3])
    _mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    threading.Thread(target=write_record, daemon=True).start()
    me = dist.get_rank()
    for index, group in enumerate(_pairs):
        if me in (index, index + 1):
            dist.barrier(group=group)
    if me:
        dist.barrier(group=_last)
    dist.barrier()
    _begun.set()
    {each.__name__: each for each in (chain, circle, mesh, transfer, gather, healthy)}[sys.argv[1]](me)
    stand()
