"""Optimizers that step inside the backward pass, usually one for each parameter, from hooks on the parameters.

To the run they are one optimizer, whose step ends with the pass: so its loss and gradients belong together again. The
gradients are gone by then (the purpose of such loops), so each part is measured as its own optimizer steps.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sentinel.hooks.core.governor import Governor
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.torch_interop.internals import backward_pass_id
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import Scalar, meeting_place, on_one_device
from sentinel.signals import SIGNALS


class OptimizersInBackward:
    """Several optimizers seen as one. They are held weakly."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._parts = [weakref.ref(optimizer) for optimizer in optimizers]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers that still exist."""
        return [group for part in self._list_parts() for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all optimizers that still exist: by parameter, as in an optimizer."""
        return {parameter: state for part in self._list_parts() for parameter, state in part.state.items()}

    def _list_parts(self) -> list[Any]:
        return [part for ref in self._parts if (part := ref()) is not None]


class GradientRows(Gradients):
    """Stands for gradients that are gone: only the rows of the layers that they belonged to."""

    def __init__(self, layers: Layers, rows: list[int]) -> None:
        super().__init__(layers)
        self.rows, self.tensors = rows, []


class WholeStep(OptimizerMonitor):
    """The monitor of all optimizers that step inside the backward pass. None of them has its hooks."""

    def end_gathered_step(self, fill: Callable[[Step], None], own: float) -> None:
        """End the step that the parts make up, once all stepped and the pass is over. `fill` adds their samples,
        which took `own` seconds."""
        if not self._dead:
            self._end_and_count(functools.partial(self._end_gathered_step, fill, own))

    def count_captured(self) -> None:
        """Count a step whose pass was captured into a CUDA graph; nothing of it is seen."""
        self._safely(functools.partial(self._begin_next_step, skipped=False, captured=True))

    def _end_gathered_step(self, fill: Callable[[Step], None], own: float) -> None:
        begin = time.perf_counter()
        self._note(begin)
        step = self._make_step(self._optimizer(), 0.0)
        step.entered = step.left = begin
        self._own_seconds, self._layers_seconds = own, 0.0
        self._outlier_watch.judge_loss(step.totals.loss, step.seq)
        self.probes.before(step, 0)
        fill(step)
        self._measure_and_queue(step)


class WholeStepFactory(Protocol):
    """Makes the monitor of all optimizers, at the first step inside a backward pass."""

    def make(self, optimizers: OptimizersInBackward) -> WholeStep:
        """Make the monitor."""

    def take_over(self) -> None:
        """Let the run be watched through that monitor, which is in place: the hello is sent from another thread."""


class BackwardGathering:
    """Gathers the steps of one backward pass. Every part's monitor holds this; it holds none of them."""

    def __init__(self, optimizers: Sequence[Any], factory: WholeStepFactory, governor: Governor) -> None:
        self.whole: WholeStep | None = None
        self.captured = False
        """Whether the present pass is captured into a CUDA graph."""
        self._optimizers = OptimizersInBackward(optimizers)
        self._factory, self._governor = factory, governor
        self._rows: dict[tuple[str, str], int] = {}
        self._digest = ""
        self._steps: dict[int, Step] = {}
        """Identity of a part's monitor -> its step in this pass."""
        self._pass = -1
        """Autograd's number of the pass."""
        self._names: dict[int, list[tuple[str, str]]] = {}
        self._seconds = 0.0

    def _open_whole(self) -> WholeStep:
        self.whole = self._factory.make(self._optimizers)
        self._factory.take_over()
        return self.whole

    def enter_part(self, part: OptimizerMonitor) -> None:
        """Sample what the optimizer of `part` is about to apply."""
        begin = time.perf_counter()
        whole = self._open_whole() if self.whole is None else self.whole
        present = backward_pass_id()
        if id(part) in self._steps:
            if present == self._pass != -1:  # a subclass's step, which calls its parent's
                return
            self._steps.clear()  # the pass before failed
        self._pass = present
        seq = whole.seq
        layers = self._governor.due(2, seq)
        self._steps[id(part)] = part.sample_part(seq, layers=layers, norms=layers or self._governor.due(1, seq))
        self._names[id(part)] = [(layer.model, layer.name) for layer in part.layers.table.layers]
        self._seconds += time.perf_counter() - begin

    def end_pass(self) -> None:
        """Close the step, as a backward pass is over."""
        if self.captured:
            self.captured = False
            self._steps.clear()
            (self._open_whole() if self.whole is None else self.whole).count_captured()
        elif self.whole is not None and self._steps:
            self.whole.end_gathered_step(self._fill, self._seconds)
            self._steps.clear()
            self._names.clear()
            self._seconds = 0.0

    def _fill(self, step: Step) -> None:
        assert self.whole is not None
        sampled = {key: part for key, part in self._steps.items() if part.gradients is not None}
        if not sampled:
            return
        step.values.update(_together([part.values for part in sampled.values()]))
        if any(part.thorough for part in sampled.values()):
            self.whole.layers.refresh(step.optimizer)
            step.thorough = True
            step.gradients = GradientRows(self.whole.layers, self._rows_of(sampled))
            for signal in dict.fromkeys(name for part in sampled.values() for name in part.layers):
                step.layers[signal] = _join_columns([part.layers[signal] for part in sampled.values() if part.layers])
        self._governor.record_sample(2 if step.thorough else 1, self._seconds)

    def _rows_of(self, sampled: dict[int, Step]) -> list[int]:
        """Return the rows of the parts' layers in the table of all optimizers, in the order of the parts."""
        assert self.whole is not None
        table = self.whole.layers.table
        if table.digest != self._digest:
            self._digest = table.digest
            self._rows = {(layer.model, layer.name): row for row, layer in enumerate(table.layers)}
        found = array("I")
        for key, part in sampled.items():
            names = self._names[key]
            if part.layers and part.gradients is not None:
                found.extend(self._rows[names[row]] for row in part.gradients.rows)
        return list(found)


def _join_columns(columns: Sequence[torch.Tensor | bytes]) -> torch.Tensor | bytes:
    packed = [column for column in columns if isinstance(column, bytes)]
    if len(packed) == len(columns):
        return b"".join(packed)
    tensors = [torch.frombuffer(bytearray(c), dtype=torch.float32) if isinstance(c, bytes) else c for c in columns]
    device = meeting_place(tensors)
    return torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])


def _together(parts: Sequence[dict[str, Scalar]]) -> dict[str, Scalar]:
    """Combine the parts' signals: norms as the root of summed squares, counts as sums, the rest as the mean."""
    found: dict[str, Scalar] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = on_one_device([part[name] for part in parts if name in part])
        signal = SIGNALS.get(name)
        if signal is not None and (signal.part_of or signal.combine == "norm"):
            squares = sum(value * value for value in values)
            found[name] = torch.sqrt(squares) if isinstance(squares, torch.Tensor) else math.sqrt(squares)
        elif signal is not None and signal.combine == "sum":
            found[name] = sum(values)
        else:
            found[name] = sum(values) / len(values)
    return found
