"""Forward passes of the watched model, by hooks on its root: their time, whether they run in fp16, the last call."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sentinel.hooks import faults
from sentinel.hooks.kept import Slot
from sentinel.hooks.readout import capturing
from sentinel.hooks.tally import Ledger


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


class _Hook(_Nothing):
    """A forward hook that stays with the model it was put on."""

    def __init__(self, watch: _Stopwatch) -> None:
        self._watch = watch


class _Begin(_Hook):
    def __call__(self, *called: object) -> None:
        # Inside a compiled graph this line is a constant, and the hook costs no graph break (nor sees anything).
        if not torch.compiler.is_compiling():
            self._watch.start(*called)


class _End(_Hook):
    def __call__(self, *called: object) -> None:
        if not torch.compiler.is_compiling():
            self._watch.stop(called[-1])


class _Stopwatch:
    def __init__(self, ledger: Ledger, device: str, slot: Slot | None) -> None:
        self._ledger = weakref.ref(ledger)
        self._device = device if _can_autocast(device) else ""
        self._begin = 0.0
        self._slot = slot

    def start(self, model: Any, args: Any, kwargs: Any) -> None:
        slot, ledger = self._slot, self._ledger()
        if ledger is None or (slot is not None and slot.running):
            return
        if ledger.when_next is not None:
            ledger.next_iteration()
        grad = torch.is_grad_enabled()
        if grad and not getattr(model, "training", True):
            ledger.ran_in_evaluation()
        # Autocast that the model itself enters, inside its forward, is not seen here.
        if grad and self._device and torch._C._is_any_autocast_enabled():
            fp16 = torch.is_autocast_enabled(self._device)
            if fp16 and torch.get_autocast_dtype(self._device) is torch.float16:
                ledger.ran_in_fp16()
        self._begin = time.perf_counter()
        if grad and slot is not None:
            try:
                if get_ident() == ledger.thread and not capturing():
                    slot.called(args, kwargs)
            except Exception:
                self._forget()

    def stop(self, output: object) -> None:
        slot, ledger = self._slot, self._ledger()
        if ledger is not None and get_ident() == ledger.thread:
            if slot is not None and slot.kept is not None and torch.is_grad_enabled():
                try:
                    if not capturing():
                        slot.returned(output)
                except Exception:
                    self._forget()
            if self._begin:
                ledger.forwarded(time.perf_counter() - self._begin)
        self._begin = 0.0  # a forward that raised leaves no end, and the next one begins anew

    def _forget(self) -> None:
        self._slot = None
        faults.swallow("keeping the batch", "a value that is not finite is not traced back")


@contextlib.contextmanager
def aside(callables: object) -> Iterator[None]:
    """`make_graphed_callables` takes no module that has hooks: ours are taken away for so long. Others stay."""
    modules = [
        one for one in (callables if isinstance(callables, tuple) else (callables,)) if isinstance(one, nn.Module)
    ]
    held: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in modules:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            held.append((hooks, dict(hooks)))
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
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


def watch(model: nn.Module, ledger: Ledger, slot: Slot | None = None) -> tuple[RemovableHandle, RemovableHandle]:
    """Time the forward passes of `model`, the object that the loop calls: wrapped or not. `slot`: for its last call."""
    stopwatch = _Stopwatch(ledger, next(model.parameters()).device.type, slot)
    return (
        model.register_forward_pre_hook(_Begin(stopwatch), prepend=True, with_kwargs=True),  # before FSDP's all-gather
        model.register_forward_hook(_End(stopwatch)),
    )
