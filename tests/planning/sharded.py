"""Trains a small GPT on two ranks under FSDP2 on gloo; rank 0 prints the peak of a real step in bytes.

Run as a program, with width, layers and batch as arguments, in torchrun's environment.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.planning import zoo


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width, layers, batch = map(int, sys.argv[1:])
    model = zoo.Transformer(causal=True, width=width, layers=layers)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    peak = zoo.measured(model, (torch.zeros(batch, 64, dtype=torch.long),), lambda p: torch.optim.AdamW(p))
    if dist.get_rank() == 0:
        print(f"peak {peak}", flush=True)
    dist.barrier()
    time.sleep(0.5)  # gloo sometimes aborts if a rank leaves right after the barrier (pytorch#190489)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
