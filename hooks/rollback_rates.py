"""Learning rates, lowered for the length of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LearningRates:
    """Multiplies the learning rates of one optimizer while it steps.

    Only then: a schedule that computes the rate anew (LambdaLR) would erase a rate that was written once, and one
    that goes on from the present rate (CosineAnnealingLR) would compound it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._lowered: list[tuple[dict[str, Any], float | Tensor]] = []

    def lower(self, factor: float) -> None:
        """At the entry of a step. After a step that raised, what it left lowered is put back first."""
        self.put_back()
        if factor == 1.0:
            return
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self._lowered.append((group, rate.clone()))
                rate.mul_(factor)
            else:
                self._lowered.append((group, rate))
                group["lr"] = rate * factor

    def put_back(self) -> None:
        """At its exit."""
        for group, rate in self._lowered:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._lowered.clear()
