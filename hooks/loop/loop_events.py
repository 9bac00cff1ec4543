"""The events of a loop that the patches see, and the watched runs that receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.tensors import Scalar


class LoopEvents(Protocol):
    """Events that a run receives. Every call is on the training thread, or on one that works for it; none may raise."""

    accumulator: StepAccumulator
    batches: Batches

    def model_ran(self) -> bool:
        """Whether the run's model ran, on this thread, since its last step."""

    def backward_begins(self, roots: object, *, weighted: bool) -> None:
        """A backward pass from `roots` begins. `weighted`: with factors for them, as in `loss.backward(1 / n)`."""

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        """A backward pass from `loss` (unscaled; None: not a scalar) took `seconds`."""

    def backward_failed(self, error: Exception) -> None:
        """A backward pass raised."""

    def loss_scaled(self, scaler: GradScaler) -> None:
        """`scaler` scaled a loss."""

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


class Listeners:
    """The watched runs. An exception of one of them is logged, and reaches neither the loop nor the other runs."""

    def __init__(self) -> None:
        self.all: tuple[LoopEvents, ...] = ()
        self.accumulator: StepAccumulator | None = None
        """Accumulator of the only watched run; None where there are several, or none."""

    def replace(self, listeners: tuple[LoopEvents, ...]) -> None:
        """Watch these runs from now on."""
        self.all = listeners
        self.accumulator = listeners[0].accumulator if len(listeners) == 1 else None

    def tell(self, event: str, call: Callable[[LoopEvents], object]) -> None:
        """Call each listener. `event` names the call in the log if it raises."""
        _call_each(self.all, event, call)

    def tell_of_pass(self, event: str, call: Callable[[LoopEvents], object]) -> None:
        """Call listeners about a backward pass: where several runs are watched, those whose model ran since their last
        step; all, where none is known to have run, since a compiled model is not seen."""
        listeners = self.all
        if len(listeners) > 1:
            try:
                listeners = tuple(one for one in listeners if one.model_ran()) or listeners
            except Exception:
                self.swallow("whose passes they are", "patches.model_ran", "passes are taken for every run's")
        _call_each(listeners, event, call)

    def swallow(self, what: str, where: str, consequence: str) -> None:
        """Call `Unseen.swallow` for all runs."""
        for run in self.all:
            run.accumulator.unseen.swallow(what, where, consequence)

    def recover(self, what: str) -> None:
        """Call `Unseen.recover` for all runs."""
        for run in self.all:
            run.accumulator.unseen.recover(what)

    def find_skipper(self, iterator: object) -> Batches | None:
        """Return the batches of the run that skips the iterator's next batch; None if no run does."""
        try:
            for run in self.all:
                if run.batches.to_skip(iterator):
                    return run.batches
        except Exception:
            self.swallow("batches to be skipped", "patches.to_skip", "no batch is skipped")
        return None


def _call_each(listeners: tuple[LoopEvents, ...], event: str, call: Callable[[LoopEvents], object]) -> None:
    for listener in listeners:
        unseen = listener.accumulator.unseen
        try:
            call(listener)
        except Exception:
            unseen.swallow(event.replace("_", " "), f"patches.{event}", "this is not seen")
        else:
            if unseen.pausing:
                unseen.recover(event.replace("_", " "))
