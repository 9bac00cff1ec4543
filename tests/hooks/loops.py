"""Small models and plain loops that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))


def batches(count: int, seed: int = 1) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator)


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = net(batch)
    return (output - batch.sum(1, keepdim=True)).square().mean()


@dataclass
class Loop:
    """A training loop as users write it. `overflow`: steps at which a gradient is made infinite."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None = None
    accumulate: int = 1
    clip: float | None = None
    unscale: bool = False
    overflow: frozenset[int] = frozenset()
    half: bool = False
    scheduler: Any = None

    def run(self, steps: int, before_step: Callable[[int], None] = lambda _: None) -> list[float]:
        """Train; return the loss of each step, as a trainer would log it."""
        losses, data = [], batches(steps * self.accumulate)
        for step in range(steps):
            self.optimizer.zero_grad()
            losses.append(sum(self._backward(next(data)) for _ in range(self.accumulate)))
            if step in self.overflow:
                next(p for p in self.net.parameters() if p.grad is not None).grad[0] = torch.inf  # type: ignore[index]
            if self.unscale and self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
            before_step(step)
            self._step()
        return losses

    def _backward(self, batch: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            loss = loss_of(self.net, batch) / self.accumulate
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        return float(loss.detach())

    def _step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()


def fit(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """Train; return the losses."""
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def sgd(net: nn.Module, **group: Any) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": list(net.parameters()), **group}], lr=0.01)
