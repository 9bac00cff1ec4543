"""Follows non-finite values through the operations of a forward and a backward pass, back to the first.

Every operation below autograd is seen, of modules, functions and gradients alike. If its output is not finite, it takes
over the origin of a non-finite input; if all inputs are finite, it is an origin itself. Values that become finite again
are forgotten: a masked score, a logarithm that `where` leaves out.

Minus infinity alone is weak, as masks are made of it. A softmax over nothing but minus infinity is an origin itself.
For any other operation that turns minus infinity into NaN, the origin is where the minus infinity came from.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from sentinel.hooks.torch_interop.internals import TorchDispatchMode, current_autograd_node, in_backward
from sentinel.hooks.torch_interop.tensors import storage_address, storage_bytes

_FINITE, _WEAK, _BAD = 0, 1, 2
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"})
"""Operations whose output is uninitialised memory."""
_ATTENTION = re.compile(r"_(scaled_dot_product|efficient|flash|cudnn)\w*_attention(?!\w*backward)")
"""Forward passes of fused attention.

What they keep for the backward pass beside their output is padded: on CUDA the memory-efficient one pads the
log-sum-exp with infinity.
"""
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_LABEL = "sentinel_module"
_TRACEBACK = "traceback_"
"""Key of the forward pass's stack in anomaly detection (torch/csrc/autograd/python_anomaly_mode.cpp)."""


class TracedCollective(Exception):
    """The pass calls a collective, which one rank must not begin alone."""


@dataclass(frozen=True)
class TraceEvent:
    """An operation that made the first non-finite value, or met it."""

    module: str
    kind: str
    operation: str
    line: str
    backward: bool
    source: str = ""
    """Name of the parameter, buffer or input that held the value already; empty: it was made here."""


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the operation in which values stopped being finite."""

    def __init__(self, known: dict[int, str], *, refuse_collectives: bool, deadline: float) -> None:
        """`known`: storage -> name of a parameter, a buffer, or an input of the model.

        `refuse_collectives`: raise TracedCollective at a collective, as other ranks do not take part. After `deadline`
        (`time.perf_counter`) nothing more is looked at.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.late = False
        self.modules: list[tuple[str, str]] = []
        """(name, class) of the modules that are running, the innermost last."""
        self._known, self._refuse_collectives, self._deadline = known, refuse_collectives, deadline
        self._origins: dict[int, TraceEvent] = {}
        """Address of a storage that holds a non-finite value -> where that came from."""
        self._unfilled: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._refuse_collectives and func.namespace in _COLLECTIVES:
            raise TracedCollective(str(func))
        kwargs = kwargs or {}
        if self._is_skipped(func):
            return func(*args, **kwargs)
        # Before the call: afterwards the inputs of an in-place operation are already its output.
        inputs = list(_tensors((args, kwargs)))
        before = [(one, self._origins.get(storage_address(one))) for one in inputs]
        writes = {storage_address(one): _state(one) for one in inputs} if func._schema.is_mutable else {}
        output = func(*args, **kwargs)
        self._look_at(func, before, writes, list(_tensors(output)))
        return output

    def origin(self, tensor: Tensor) -> TraceEvent | None:
        """Return where the non-finite values of a tensor came from; None if that is not known."""
        return self._origins.get(storage_address(tensor))

    def _is_skipped(self, func: Any) -> bool:
        if not self.late and time.perf_counter() > self._deadline:
            self.late = True
        return self.late or func.is_view

    def _look_at(
        self, func: Any, inputs: list[tuple[Tensor, TraceEvent | None]], writes: dict[int, int], outputs: list[Tensor]
    ) -> None:
        name = func._schema.name.rpartition("::")[2]
        for number, output in enumerate(outputs):
            place = storage_address(output)
            if name in _UNFILLED or (number and _ATTENTION.match(name)):
                self._unfilled.add(place)
                continue
            if _whole(output):
                self._unfilled.discard(place)
            elif place in self._unfilled:  # written in part: the rest is still uninitialised
                continue
            state = _state(output)
            if state == _FINITE:
                if _whole(output):
                    self._origins.pop(place, None)
            elif (event := self._event(func, name, inputs, writes, state)) is not None:
                self._origins[place] = event

    def _event(
        self, func: Any, name: str, inputs: list[tuple[Tensor, TraceEvent | None]], writes: dict[int, int], state: int
    ) -> TraceEvent | None:
        """Return the origin of a non-finite output: the event that an input brought, or else the operation itself."""
        weak: TraceEvent | None = None
        for tensor, origin in inputs:
            found = writes.get(storage_address(tensor), -1)
            found = found if found >= 0 else _state(tensor)
            if found == _FINITE or storage_address(tensor) in self._unfilled:
                continue
            source = self._known.get(storage_address(tensor), "")
            event = origin or (self._make_event(func, source or "a constant") if source or found == _BAD else None)
            if found == _BAD and event is not None:
                return event
            weak = weak or event
        if weak is not None and (state == _WEAK or "softmax" not in name):
            return weak
        return self._make_event(func, "")

    def _make_event(self, func: Any, source: str) -> TraceEvent:
        operation = str(func._schema.name).replace("::", ".")
        node: Any = current_autograd_node() if in_backward() else None
        if node is None:
            module, kind = self.modules[-1] if self.modules else ("", "")
            return TraceEvent(module, kind, operation, _line(sys._getframe(2)), False, source)
        metadata: dict[str, Any] = node.metadata
        module, kind = metadata.get(_LABEL, ("", ""))
        line = _line_of(metadata.get(_TRACEBACK, ()))
        return TraceEvent(module, kind, f"{operation} in {node.name()}", line, True, source)


def label(outputs: Sequence[Tensor], module: tuple[str, str]) -> None:
    """Attribute to this module the nodes of the graph that led to these outputs and have no owner yet."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if _LABEL not in node.metadata:
            node.metadata[_LABEL] = module
            waiting += [above for above, _ in node.next_functions if above is not None]


def finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. On a device this waits for it."""
    return _state(tensor) == _FINITE


def is_broken(tensor: Tensor) -> bool:
    """Whether an element is NaN or +infinity. -infinity alone is not: masks hold it. On a device this waits for it."""
    return _state(tensor) == _BAD


def storages(named: Iterator[tuple[str, Tensor]]) -> dict[int, str]:
    """Map the address of each storage to a name: the first, where several tensors share it."""
    found: dict[int, str] = {}
    for name, tensor in named:
        found.setdefault(storage_address(tensor), name)
    return found


def _state(tensor: Tensor) -> int:
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return _FINITE
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout is not torch.strided:
        tensor = tensor._values()
    if tensor.element_size() == 1:  # float8 has no such kernels
        tensor = tensor.float()
    low, high = (float(bound) for bound in torch.aminmax(tensor.detach()))
    if low == low and high < float("inf") and high == high:
        return _FINITE if low > -float("inf") else _WEAK
    return _BAD


def _whole(tensor: Tensor) -> bool:
    """Whether the tensor covers all of its storage."""
    return tensor.numel() * tensor.element_size() >= storage_bytes(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


_LIBRARIES = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def library(file: str) -> bool:
    """Whether the file is PyTorch's or ours, or not a real file."""
    return file.startswith(("<", *_LIBRARIES))


def _line(frame: FrameType | None) -> str:
    """Return the innermost place that is neither PyTorch's nor ours."""
    while frame is not None and library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _line_of(stack: Sequence[str]) -> str:
    """Return the innermost place of a formatted stack that is neither PyTorch's nor ours."""
    for entry in reversed(stack):
        head = entry.strip().partition("\n")[0]
        file, _, rest = head.removeprefix('File "').partition('", line ')
        if rest and not library(file):
            return f"{file}:{rest.partition(',')[0]}"
    return ""
