"""What the patches tell, event by event."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.tensors import Scalar


class LoopEvents(Protocol):
    """What is told of a run. Every call is on the thread that trains, or one that does its work, and must not raise."""

    accumulator: StepAccumulator
    batches: Batches

    def model_ran(self) -> bool:
        """Whether its model ran, on this thread, since its last step."""

    def backward_begins(self, roots: object, *, weighted: bool) -> None:
        """A backward pass from `roots` begins. `weighted`: it was given factors of them, as `loss.backward(1 / n)`."""

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        """A backward pass from `loss` (unscaled; None: not a scalar) took `seconds`."""

    def backward_failed(self, error: Exception) -> None:
        """A backward pass raised."""

    def loss_scaled(self, scaler: GradScaler) -> None:
        """`scaler` scaled a loss."""

    def batch_fetched(self, iterator: object, seconds: float, batch: object) -> None:
        """A DataLoader's iterator gave `batch` after `seconds`."""

    def loader_exhausted(self, iterator: object) -> None:
        """A DataLoader's iterator has no more batches."""

    def to_skip(self, iterator: object) -> bool:
        """Whether the batch that comes next from `iterator` is to be thrown away."""

    def batch_skipped(self, iterator: object) -> None:
        """It was thrown away."""

    def scaler_enters(self, scaler: GradScaler, optimizer: object) -> None:
        """`scaler.step(optimizer)` begins."""

    def scaler_exits(self, scaler: GradScaler, optimizer: object) -> None:
        """`scaler.step(optimizer)` is over; the optimizer stepped, or was withheld."""

    def scaler_raised(self, scaler: GradScaler, optimizer: object) -> None:
        """`scaler.step(optimizer)` raised."""

    def gradients_clipped(self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor | None) -> None:
        """The gradients of `parameters`, whose L2 norm was `norm`, were clipped to `max_norm`. None: another norm."""

    def capturing(self) -> None:
        """A CUDA graph is about to be captured."""
