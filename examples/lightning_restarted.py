"""Fits a LightningModule, and after a failure resumes from the Lightning checkpoint that Sentinel chooses.

pip install lightning
sentinel run -- python examples/lightning_restarted.py --break-at 1650

Without `--break-at` nothing breaks. With `--nan-at 1650` a weight becomes NaN, once: checkpoints that were saved after
that are not used.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sentinel.hooks.lightning import SentinelCallback, checkpoint


class Spiral(pl.LightningModule):
    """Classifies points by which of two spirals they belong to. They overlap: near a loss of 0, Adam's would jump."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self.net(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def spirals(points: int = 16384) -> TensorDataset:
    label = torch.arange(points) % 2
    radius = torch.rand(points) * 3
    angle = 3 * radius + label * torch.pi
    noise = 0.2 * torch.randn(points, 2)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + noise, label)


class Breaks(pl.Callback):
    """Makes the run fail once, for the example's sake."""

    def __init__(self, done: Path, *, die_at: int, nan_at: int) -> None:
        self._done, self._die_at, self._nan_at = done, die_at, nan_at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Fail, if it is due, before the step after `trainer.global_step`."""
        if trainer.global_step in (self._die_at, self._nan_at) and not self._done.exists():
            self._done.touch()
            if trainer.global_step == self._die_at:
                os._exit(1)  # as if killed: no `finally`, no goodbye
            with torch.no_grad():
                pl_module.net[0].weight[0, 0] = float("nan")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("lightning-restarted"))
    parser.add_argument("--break-at", type=int, default=-1, metavar="STEP")
    parser.add_argument("--nan-at", type=int, default=-1, metavar="STEP")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    saves = ModelCheckpoint(dirpath=options.folder, every_n_train_steps=200, save_top_k=-1)
    breaks = Breaks(options.folder / "broken", die_at=options.break_at, nan_at=options.nan_at)
    trainer = pl.Trainer(max_epochs=20, accelerator="auto", logger=False, callbacks=[saves, SentinelCallback(), breaks])
    trainer.fit(
        Spiral(),
        DataLoader(spirals(), batch_size=64, shuffle=True),
        ckpt_path=checkpoint(options.folder),
    )
