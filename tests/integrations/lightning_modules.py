"""LightningModules for tests. Loading Lightning takes seconds, so only the tests that train with it import this."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch


class Net(lightning.LightningModule):
    """A regression with a learning rate schedule. `fail_at`: the training step that raises."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.losses: list[float] = []
        self.fail_at = fail_at

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        if len(self.losses) == self.fail_at:
            raise ValueError("the user's own mistake")
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


class Logging(Net):
    """Logs a reward and an entropy, as a module that trains a policy may."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("train/reward", float(self.global_step))
        self.log("train/entropy", loss.detach(), on_step=True, on_epoch=True)
        self.log("train_loss", 1e9)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("val_accuracy", 0.5)
        self.log("val_step", float(self.global_step))
