"""Whether gradients are cleared between two steps: `zero_grad()` that was forgotten adds every batch to all before it.

At the exit of a step a few gradients are noted, by the address and the version that autograd counts for each tensor.
Clearing one makes it None, another tensor, or the next version of it; a backward pass adds to it and makes the
next version too. So a gradient was kept if nothing changed it between the passes. Nothing is read from a device.
"""

from __future__ import annotations

from typing import Any

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import tensors
from sentinel.hooks.torch_interop.layer_table import local
from sentinel.hooks.torch_interop.strided_sample import meeting_place, spread
from sentinel.hooks.torch_interop.tensors import Scalar, scalar

SEARCHED = 16
"""Parameters from each end of the model: the first of them that has a gradient is noted."""
ELEMENTS = 64

_Mark = tuple[int, int]


class ZeroGrad(Probe):
    """`gradients_kept`: 1 where the gradients of the step before were still there when this one's were added."""

    relaxed = True

    def __init__(self) -> None:
        self._noted: list[tuple[Any, _Mark]] = []
        """(parameter, mark of its gradient). Parameters outlive the optimizer's hooks, which hold this."""
        self._armed = self._passed = False
        self._size: Scalar | None = None
        """Whether there is anything in what is still there, once it was looked at."""

    def pass_begins(self, roots: Any) -> None:
        for parameter, mark in self._noted:
            if _mark(parameter) != mark:
                self._noted = []
                return
        if self._noted and self._size is None and not tensors.is_capturing():  # or the graph would look at it, too
            self._size = self._measure()

    def pass_ended(self) -> None:
        self._passed = True
        if self._noted:
            marks = [(parameter, _mark(parameter)) for parameter, _ in self._noted]
            self._noted = [(parameter, mark) for parameter, mark in marks if mark is not None]

    def over(self, step: Step) -> None:
        if self._armed and self._passed:
            step.values["gradients_kept"] = self._size if self._noted and self._size is not None else 0.0
        self._armed, self._passed, self._noted = False, False, []

    def arm(self, step: Step) -> None:
        self._passed, self._size = False, None
        if step.parameters is not None:
            self._note(step.parameters.measured)

    def _note(self, measured: list[tuple[int, torch.Tensor, bool]]) -> None:
        for end in (measured[:SEARCHED], measured[: -SEARCHED - 1 : -1]):
            for _, parameter, _ in end:
                # DeepSpeed's stand-ins for partitions have a gradient in the step alone, and it clears them itself.
                if isinstance(parameter, torch.Tensor) and (mark := _mark(parameter)) is not None:
                    self._noted.append((parameter, mark))
                    break
        self._armed = bool(self._noted)

    def _measure(self) -> Scalar:
        """Where all of it is 0 it makes no difference whether it was cleared, and cannot be told. Both ends are looked
        at: places that are a stride apart may all belong to one input, which is always 0."""
        with torch.no_grad():
            parts = [spread(local(parameter.grad), ELEMENTS).any() for parameter, _ in self._noted]
            device = meeting_place(parts)
            return scalar(torch.stack([part.to(device, non_blocking=True) for part in parts]).any().float())


def _mark(parameter: torch.Tensor) -> _Mark | None:
    """Of its gradient: None where there is none, or one that has no plain memory."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    gradient = local(gradient)
    return gradient.data_ptr(), gradient._version
