"""Ranks of torchrun with DeepSpeed that train with and without Sentinel, recorded, for each stage of ZeRO.

torchrun --nproc-per-node 2 zero.py FOLDER WAY...     leaves WAY.RANK (frames) and WAY.RANK.json for each way
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sentinel
from sentinel.hooks import auto_attach
from sentinel.hooks.core import governor
from sentinel.hooks.deepspeed import attach
from tests.programs import uncompiled
from tests.programs.ranks import CLIP, LEARNING_RATE, ROWS, batches, collectives, loss_of, model


def engine_of(way: str) -> Any:
    """Return an engine. `way`: STAGE, then `-clip`, `-twice` (two micro-batches), `-bf16`, `-unasked` (no attach)."""
    stage, *options = way.split("-")
    config = {
        "train_micro_batch_size_per_gpu": ROWS // 4 if "twice" in options else ROWS // 2,
        "gradient_accumulation_steps": 2 if "twice" in options else 1,
        "zero_optimization": {"stage": int(stage)},
        "gradient_clipping": CLIP if "clip" in options else 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "bf16": {"enabled": "bf16" in options},
    }
    net = model()
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def train(way: str, watched: bool) -> tuple[list[torch.Tensor], int, bool]:
    """Train; return (this rank's weights, collectives in the steps, whether the engine was restored)."""
    engine = engine_of(way)
    methods = set(vars(engine.optimizer))
    unasked = "unasked" in way and watched
    hook = register_optimizer_step_pre_hook(lambda one, *_: auto_attach.attach_at_step(one)) if unasked else None
    monitor = None
    if watched and not unasked:  # both ways to attach
        named = "clip" in way
        monitor = attach(engine, run=way) if named else sentinel.attach(engine, engine.optimizer, run=way)
    before, rank, micro = collectives(), dist.get_rank(), engine.train_micro_batch_size_per_gpu()
    for batch in batches():
        mine = batch[rank * ROWS // 2 : (rank + 1) * ROWS // 2]
        for part in mine.split(micro):
            loss = loss_of(engine, part.to(engine.module[0].weight.dtype))
            engine.backward(loss)
            engine.step()
    taken = collectives() - before
    if hook is not None:
        hook.remove()
        monitor = attach(engine, run=way)  # takes over
    if monitor is not None:
        monitor.detach()
    left = {name for name in vars(engine.optimizer) if name in ("step", "scale_if_loss")}
    return [kept(p, rank) for p in engine.module.parameters()], taken, left <= methods


def kept(parameter: Any, rank: int) -> torch.Tensor:
    """Return this rank's part of a parameter; at stage 3 without the last part's padding, which is arbitrary."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach().clone()  # type: ignore[no-any-return]
    part = parameter.ds_tensor.detach()
    return part[: max(parameter.ds_numel - rank * part.numel(), 0)].clone()  # type: ignore[no-any-return]


def main() -> None:
    governor.FIRST = dict.fromkeys(governor.FIRST, 1)
    governor.DECISIONS = (50,)
    uncompiled.spare()
    deepspeed.init_distributed("gloo")
    folder, ways = Path(sys.argv[1]), sys.argv[2:]
    for way in ways:
        os.environ["SENTINEL_RECORD"] = str(folder / way)
        (bare, without, _), (weights, taken, restored) = train(way, watched=False), train(way, watched=True)
        same = all(torch.equal(one, other) for one, other in zip(bare, weights, strict=True))
        said = {"same": same, "bare": without, "watched": taken, "restored": restored}
        (folder / f"{way}.{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
