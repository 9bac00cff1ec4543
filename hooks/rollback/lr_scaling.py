"""Lowers learning rates for the length of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.torch_interop.internals import exclude_from_tracing


class LearningRates:
    """Multiplies the learning rates of one optimizer while it steps.

    Only then: a schedule that computes the rate again (LambdaLR) would erase a rate that was written once, and one that
    goes on from the present rate (CosineAnnealingLR) would compound it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._lowered: list[tuple[dict[str, Any], float | Tensor]] = []
        self._own_step: Any = None
        """What the optimizer had as `step`, if not its class's: a scheduler sets one."""
        self._guarded_step: Any = None

    def guard_step(self, unseen: Unseen) -> None:
        """Restore the rates also where a step raises, for which torch has no hook: a scheduler may step before the next
        step, and a checkpoint may be saved. `unseen` records what fails in that. Does nothing the second time."""
        if self._guarded_step is not None:
            return
        step: Any = self._optimizer.step
        of_class = getattr(step, "__func__", None)

        @functools.wraps(of_class or step)
        def take_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                # A copy of the optimizer has this method, too, and must not step the optimizer.
                return of_class(optimizer, *args, **kwargs) if of_class is not None else step(*args, **kwargs)
            except BaseException:
                with unseen.swallow_faults("learning rates put back", "with the rate as it is"):
                    self.put_back()
                raise

        self._own_step = vars(self._optimizer).get("step")
        # A method: a scheduler that is made later takes its function.
        self._guarded_step = self._optimizer.step = MethodType(take_step, self._optimizer)  # type: ignore[method-assign]

    def release_step(self) -> None:
        """Undo `guard_step`, unless other code has wrapped the step since: then its guard does nothing."""
        step, self._guarded_step = self._guarded_step, None
        if step is not None and vars(self._optimizer).get("step") is step:
            del self._optimizer.step
            if self._own_step is not None:
                self._optimizer.step = self._own_step  # type: ignore[method-assign]

    def lower(self, factor: float) -> None:
        """Lower the rates at the entry of a step. They are restored first if they still are lowered: a step raised that
        was not guarded, as where another library has replaced it."""
        self.put_back()
        if factor == 1.0:
            return
        shared: set[int] = set()  # a rate that is a tensor: torch gives the same one to all groups
        for group in self._optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                if id(rate) not in shared:
                    shared.add(id(rate))
                    self._lowered.append((group, rate.clone()))
                    rate.mul_(factor)
            elif isinstance(rate, int | float):
                self._lowered.append((group, rate))
                group["lr"] = rate * factor

    @property
    def without(self) -> str:
        """Name of the optimizer if a group has no rate, because it finds its own, as Adafactor may. Otherwise empty."""
        alone = any(not isinstance(group.get("lr"), int | float | Tensor) for group in self._optimizer.param_groups)
        return type(self._optimizer).__name__ if alone else ""

    def put_back(self) -> None:
        """Restore the rates at the exit of the step."""
        for group, rate in self._lowered:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._lowered.clear()


class LoweredRates:
    """Lowers the rates of all optimizers of a run, by the product of the factors so far.

    `lower` and `put_back` are called at the steps of the first optimizer; the others get hooks of their own, once there
    is a factor.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], unseen: Unseen) -> None:
        """`unseen` records what fails in our hooks."""
        self._optimizers, self._unseen = optimizers, unseen
        self._rates = [LearningRates(optimizer) for optimizer in optimizers]
        self._factor = 1.0
        self._hooks: list[Any] = []

    def multiply(self, factor: float) -> str:
        """Lower the rates by a further factor from the next steps on. Returns what could not be done.

        A number that is no factor changes nothing.
        """
        if 0 < factor <= 1:
            self._factor *= factor
        if self._factor != 1.0:
            for rates in self._rates:
                with self._unseen.swallow_faults("steps that raise", "with the rate lowered after one"):
                    rates.guard_step(self._unseen)
        if self._factor != 1.0 and not self._hooks:
            for optimizer, rates in zip(self._optimizers[1:], self._rates[1:], strict=True):
                before, after = (exclude_from_tracing(partial(one, rates)) for one in (self._before, self._after))
                self._hooks.append(optimizer.register_step_pre_hook(before))
                self._hooks.append(optimizer.register_step_post_hook(after))
        without = next(filter(None, (rates.without for rates in self._rates)), "")
        return f"lr_factor={factor:g}: {without} has no rate to lower" if 0 < factor < 1 and without else ""

    def _before(self, rates: LearningRates, *_: object) -> None:
        with self._unseen.swallow_faults("lowered learning rates", "with the rate as it is"):
            rates.lower(self._factor)

    def _after(self, rates: LearningRates, *_: object) -> None:
        with self._unseen.swallow_faults("learning rates put back", "with the rate as it is"):
            rates.put_back()

    def lower(self) -> None:
        """Lower the first optimizer's rates at the entry of its step."""
        self._rates[0].lower(self._factor)

    def put_back(self) -> None:
        """Restore the first optimizer's rates at the exit of its step."""
        self._rates[0].put_back()

    def close(self) -> None:
        """Remove the hooks, and restore all rates."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for rates in self._rates:
            rates.release_step()
            rates.put_back()
