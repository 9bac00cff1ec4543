"""A few parameters by whose gradients it is told which backward passes count.

    a pass that did not reach the model     of another one, which trains in the same process and is not watched
    passes that were thrown away            the loop cleared the gradients and took the step again: it skips a batch
                                            whose norm is out of bounds, or tries again after an exception

Gradients are seen by identity and version, which autograd counts: no value is read but, on the host, a few elements of
one that was written to. Losses of a loop that clears its gradients between the passes of most steps (SAM, gradients of
several tasks, of single samples) all count, as it adds up what it took by itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.strided_sample import spread

FEW = 4
"""Parameters, at even distances: a pass may reach a part of the model alone."""
ELEMENTS = 64
STEPS = 16
"""Of which most say whether the loop clears between its passes."""
RENEWED_EVERY = 256
"""Passes after which others are chosen: what trains may have changed."""

_Mark = tuple[int, int] | None


class PassFilter:
    """Of the one optimizer of a run. Asked before and after each backward pass that is looked at."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._chosen: list[weakref.ref[torch.Tensor]] = []
        self._passes = 0
        self._before: list[_Mark] = []
        self._after: list[_Mark] = []
        self._steps: deque[bool] = deque(maxlen=STEPS)
        """Whether gradients were cleared between the passes of the last steps."""
        self._cleared = False
        """Whether they were in the present one."""
        self.clearings = 0
        """How often they were, since the last step."""

    def begins(self, *, first: bool) -> bool:
        """A pass begins, the `first` one of its step or another. Whether those before it were thrown away."""
        if first:
            self.clearings = 0
        if first and self._passes:
            self._steps.append(self._cleared)
            self._cleared = False
        self._before = self._marks()
        if first or not self._was_cleared():
            return False
        self._cleared = True
        self.clearings += 1
        return bool(self._steps) and sum(self._steps) * 2 < len(self._steps)

    def end_pass(self) -> bool:
        """It is over: whether it may have reached the model."""
        self._passes += 1
        reached = not self._chosen or self._marks() != self._before
        if not self._chosen or self._passes % RENEWED_EVERY == 0 or any(one() is None for one in self._chosen):
            self._choose()
        self._after = self._marks()
        return reached

    def _choose(self) -> None:
        there = [p for _, p, _ in self._layers.measured if isinstance(p, torch.Tensor) and p.grad is not None]
        self._chosen = [weakref.ref(p) for p in there[:: -(-len(there) // FEW)]] if there else []

    def _marks(self) -> list[_Mark]:
        return [_mark(parameter) if (parameter := one()) is not None else None for one in self._chosen]

    def _was_cleared(self) -> bool:
        """Since the last pass: taken away, or on the host written over with zeros."""
        if not self._chosen or all(mark is None for mark in self._after):
            return False
        if all(mark is None for mark in self._before):
            return True
        return self._before != self._after and all(
            parameter.grad is None or _is_zero(parameter.grad)
            for one in self._chosen
            if (parameter := one()) is not None
        )


def _mark(parameter: torch.Tensor) -> _Mark:
    gradient = parameter.grad  # of what DeepSpeed has partitioned it is there in the step alone, and no such is chosen
    return (id(gradient), local(gradient)._version) if gradient is not None else None


def _is_zero(gradient: Any) -> bool:
    gradient = local(gradient)
    if not gradient.is_cpu or gradient.layout is not torch.strided or not gradient.numel():
        return False
    with torch.no_grad():
        return not bool(spread(gradient, ELEMENTS).any())
