"""Forward passes of the watched model, by hooks on its root: their time, whether they run in fp16, the last call."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import compiler, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from sentinel.hooks.loop.forward_capture import FAST_SECONDS, ORIGIN, CallSlot, keep
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.internals import is_any_autocast_enabled
from sentinel.hooks.torch_interop.tensors import CUDA, is_capturing
from sentinel.wire.heartbeat_page import Work

_FORWARD = Work.FORWARD


class _Nothing:
    """What a copy of a hook is: the forward passes of an EMA are not the model's.

    In a pickle it is a call of `sys.audit`, which takes anything and returns None: a checkpoint must load where
    Sentinel is not installed.
    """

    def __call__(self, *_: object) -> None:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        return _Nothing()  # and not the audit: torch.compile can trace this one

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (sys.audit, "sentinel.copied_hook")


class ForwardHook(_Nothing):
    """One that stays with the model it was put on."""

    def __init__(self, stopwatch: ForwardTimer) -> None:
        self.stopwatch = stopwatch


class _Begin(ForwardHook):
    def __call__(self, *called: object) -> None:
        # Inside a compiled graph this line is a constant, and the hook costs no graph break (nor sees anything).
        if not (is_dynamo_compiling() or compiler._is_compiling_flag):
            self.stopwatch.start(*called)


class _End(ForwardHook):
    def __call__(self, *called: object) -> None:
        if not (is_dynamo_compiling() or compiler._is_compiling_flag):
            self.stopwatch.stop(called[-1])


class ForwardTimer:
    """Called at every forward pass, with nothing of ours in the processor's caches: what would be a line in a function
    is a line here."""

    def __init__(self, accumulator: StepAccumulator, device: str, slot: CallSlot | None) -> None:
        self._accumulator = weakref.ref(accumulator)
        self._device = device if _can_autocast(device) else ""
        self._begin = 0.0
        self._slot = slot
        self._keeps = False
        """Whether the pass under way is in the slot."""

    def start(self, model: Any, args: Any, kwargs: Any) -> None:
        slot, accumulator = self._slot, self._accumulator()
        if accumulator is None or (slot is not None and slot.running) or get_ident() != accumulator.thread:
            return
        if accumulator.when_next is not None:
            accumulator.next_iteration()
        self._keeps = False
        if is_grad_enabled():
            if not getattr(model, "training", True):
                accumulator.totals.evaluating = True
            # Autocast that the model itself enters, inside its forward, is not seen here.
            autocast = is_any_autocast_enabled()
            if autocast and self._device:
                fp16 = torch.is_autocast_enabled(self._device)
                if fp16 and torch.get_autocast_dtype(self._device) is torch.float16:
                    accumulator.totals.fp16 = True
            if slot is not None:
                try:
                    if not slot.frozen and not (CUDA and is_capturing()):
                        slot.kept = keep(args, kwargs, draws=slot.draws is not False, autocast=autocast)
                        self._keeps = True
                        if accumulator.unseen.pausing:
                            accumulator.unseen.restore(ORIGIN)
                except Exception:
                    self._forget(accumulator)
        else:
            accumulator.ran_without_gradients()
        self._begin = perf_counter()

    def stop(self, output: object) -> None:
        now, begin, slot, accumulator = perf_counter(), self._begin, self._slot, self._accumulator()
        if accumulator is None or get_ident() != accumulator.thread:
            return
        self._begin = 0.0  # a forward that raised leaves no end, and the next one starts over
        if self._keeps and slot is not None and not slot.running:
            try:
                if (now - slot.returned_at >= FAST_SECONDS or not slot.known) and not (CUDA and is_capturing()):
                    slot.record_return(output)
                slot.returned_at = now
            except Exception:
                self._forget(accumulator)
        if begin:
            totals = accumulator.totals
            totals.forwards += 1
            totals.forward_seconds += now - begin
            accumulator.progress += 1
            accumulator.work = _FORWARD

    def _forget(self, accumulator: StepAccumulator) -> None:
        """The batch of this pass is not kept; after a fault of ours none is."""
        slot, self._keeps = self._slot, False
        if slot is not None and not slot.frozen:
            slot.kept = None
        if accumulator.unseen.record_failure(
            ORIGIN, "keeping the batch", "a value that is not finite is not traced back"
        ):
            self._slot = None


@contextlib.contextmanager
def aside(callables: object) -> Iterator[None]:
    """`make_graphed_callables` and `torch.jit.script` take no module that has hooks: ours, and what is left of them in
    copies, are taken away for so long. Others stay."""
    given = callables if isinstance(callables, tuple) else (callables,)
    modules = [module for one in given if isinstance(one, nn.Module) for module in one.modules()]
    held: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            held.append((hooks, dict(hooks)))
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Nothing)]:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.clear()
            hooks.update(before)


def _can_autocast(device: str) -> bool:
    try:
        torch.is_autocast_enabled(device)
    except RuntimeError:  # a kind of device that has no autocast
        return False
    return True


def watch(
    model: nn.Module, accumulator: StepAccumulator, slot: CallSlot | None = None
) -> tuple[RemovableHandle, RemovableHandle]:
    """Time the forward passes of `model`, the object that the loop calls: wrapped or not. `slot`: for its last call."""
    first = next(model.parameters(), None)  # a loss with weights of its own, say, may have none yet
    stopwatch = ForwardTimer(accumulator, first.device.type if first is not None else "cpu", slot)
    return (
        model.register_forward_pre_hook(_Begin(stopwatch), prepend=True, with_kwargs=True),  # before FSDP's all-gather
        model.register_forward_hook(_End(stopwatch)),
    )
