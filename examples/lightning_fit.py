"""Fits a LightningModule to two spirals; Sentinel is added as one callback.

pip install lightning
python examples/lightning_fit.py
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sentinel.hooks.lightning import SentinelCallback


class Spiral(pl.LightningModule):
    """Classifies points by which of two spirals they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(self.net(points), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def spirals(points: int = 4096) -> TensorDataset:
    label = torch.arange(points) % 2
    radius = torch.rand(points) * 3
    angle = 3 * radius + label * torch.pi
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), label)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=5, accelerator="auto", logger=False, enable_checkpointing=False, callbacks=[SentinelCallback()]
    )
    trainer.fit(Spiral(), DataLoader(spirals(), batch_size=64, shuffle=True))
