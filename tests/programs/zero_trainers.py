"""Ranks of torchrun whose trainers use DeepSpeed: a loop of Accelerate, and the Hugging Face Trainer.

torchrun --nproc-per-node 2 zero_trainers.py FOLDER WAY...     leaves WAY.RANK (frames) and WAY.RANK.json for each way
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import accelerate
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import DeepSpeedPlugin
from torch import nn

from sentinel.hooks import accelerate as integration
from sentinel.hooks.transformers import SentinelCallback
from tests.programs import uncompiled

STEPS, CLIP = 4, 0.1


class Net(nn.Module):
    """Returns its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def rows() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(8 * STEPS)]


def loop(stage: int) -> list[tuple[float, float]]:
    """Train by a loop of Accelerate; return (this rank's loss, gradient norm) of each step."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
    }
    accelerator = accelerate.Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    loader: Any = torch.utils.data.DataLoader(rows(), batch_size=4)
    net: Any = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    found = []
    with integration.attach(accelerator, net, optimizer, loader=loader, run="loop"):
        for batch in loader:
            loss = net(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            found.append((float(loss), float(net.get_global_grad_norm())))
    return found


def trainer(stage: int, folder: Path) -> list[tuple[float, float]]:
    """Train by the Trainer; return (loss of all ranks, gradient norm) of each step."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1, max_grad_norm=CLIP, deepspeed=config,
    )  # fmt: skip
    made = transformers.Trainer(Net(), arguments, train_dataset=rows(), callbacks=[SentinelCallback(run="trainer")])
    made.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry]


def main() -> None:
    warnings.simplefilter("ignore")
    uncompiled.spare()
    folder = Path(sys.argv[1])
    for way in sys.argv[2:]:
        os.environ["SENTINEL_RECORD"] = str(folder / way)
        kind, _, stage = way.partition("-")
        found = loop(int(stage)) if kind == "loop" else trainer(int(stage), folder)
        (folder / f"{way}.{dist.get_rank()}.json").write_text(json.dumps(found))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
