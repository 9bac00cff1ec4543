"""Patches a few places in PyTorch, so that a loop can be watched without a change to it.

    torch.autograd.backward              the loss: Tensor.backward looks it up there
    GradScaler.scale, .step              the loss before scaling; steps that are withheld
    clip_grad._get_total_norm,
        ._clip_grads_with_norm_          the norm before clipping, for free; and their public names
    _BaseDataLoaderIter.__next__         the wait for data
    cuda.make_graphed_callables,
    jit._recursive.create_script_module  refuse modules with hooks: ours are removed meanwhile. (`jit.script` itself
                                         looks at the frame that calls it, which must stay the user's)
    CUDAGraph.capture_begin              fails where another thread copies: a snapshot under way is finished first

Installed at the first `listen`, removed at the last `unlisten`. Where other code patched over ours in between, our
wrapper cannot be removed from under it: it stays and does nothing. All except those of clipping are hidden from
torch.compile (`exclude_from_tracing`), as a traced wrapper would cause more graph breaks and see nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from sentinel.hooks.loop import forward_passes, losses
from sentinel.hooks.loop.grad_clipping import ClippingPatch
from sentinel.hooks.loop.loop_events import Listeners, LoopEvents
from sentinel.hooks.loop.losses import BackwardPatch
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.internals import LoaderIterator, exclude_from_tracing, script_compiler


@dataclass(slots=True)
class _Patch:
    owner: Any
    name: str
    original: Any
    wrapper: Any
    live: list[bool]
    """Shared with the wrapper: [False] makes it pass every call through."""


_lock = threading.Lock()
_listeners = Listeners()
_patches: list[_Patch] = []


def listen(listener: LoopEvents) -> None:
    """Report events to `listener` from now on."""
    with _lock:
        if not _listeners.all:
            _install()
        _listeners.replace((*_listeners.all, listener))


def unlisten(listener: LoopEvents) -> None:
    """Report no more events to `listener`. The last call restores what was patched. No error if it did not listen."""
    with _lock:
        _listeners.replace(tuple(one for one in _listeners.all if one is not listener))
        if not _listeners.all:
            _restore()


def list_accumulators() -> list[StepAccumulator]:
    """Return the accumulators of all watched runs."""
    return [listener.accumulator for listener in _listeners.all]


def note_scaled(scaler: GradScaler) -> None:
    """Record that the scaler scaled the loss of the backward pass to come, before anything was patched."""
    losses.note_scale(scaler._scale)
    _listeners.tell_of_pass("loss_scaled", lambda run: run.loss_scaled(scaler))


def list_installed() -> tuple[str, ...]:
    """Return what is patched now, as `owner.name`."""
    return tuple(f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}" for patch in _patches)


def _install() -> None:
    clipping = ClippingPatch(_listeners)
    _replace(torch.autograd, "backward", BackwardPatch(_listeners).around)
    for kind in _with_scale_of_their_own(GradScaler):
        _replace(kind, "scale", _scale)
    _replace(GradScaler, "step", _scaler_step)
    _replace(LoaderIterator, "__next__", _next_batch)
    for owner in (torch.cuda, torch.cuda.graphs):
        _replace(owner, "make_graphed_callables", _without_hooks)
    _replace(script_compiler, "create_script_module", _without_hooks)
    _replace(torch.cuda.CUDAGraph, "capture_begin", _capture)
    for owner, norm, clip in (
        (clip_grad, "_get_total_norm", "_clip_grads_with_norm_"),
        (torch.nn.utils, "get_total_norm", "clip_grads_with_norm_"),
    ):
        _replace(owner, norm, clipping.total_norm, traced=True)
        _replace(owner, clip, clipping.clip, traced=True)


def _with_scale_of_their_own(kind: type[GradScaler]) -> Iterator[type[GradScaler]]:
    """Yield the classes that define `scale` themselves, as FSDP's scaler does."""
    if "scale" in vars(kind):
        yield kind
    for each in kind.__subclasses__():
        yield from _with_scale_of_their_own(each)


def _replace(owner: Any, name: str, make: Callable[[Any, list[bool]], Any], *, traced: bool = False) -> None:
    original = getattr(owner, name, None)
    if original is None:  # private names come and go; what this one shows is then not seen
        return
    live = [True]
    made = make(original, live)
    wrapper = functools.wraps(original)(made if traced else exclude_from_tracing(made))
    _patches.append(_Patch(owner, name, original, wrapper, live))
    setattr(owner, name, wrapper)


def _restore() -> None:
    for patch in reversed(_patches):
        patch.live[0] = False
        if getattr(patch.owner, patch.name) is patch.wrapper:
            setattr(patch.owner, patch.name, patch.original)
    _patches.clear()


def _scale(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if live[0] and scaled is not outputs:
            try:
                losses.remember(scaled, outputs)
            except Exception:
                _listeners.swallow("scales of losses", "patches.scale", "losses are seen as they are scaled")
            else:
                _listeners.recover("scales of losses")
            losses.note_scale(self._scale)
            _listeners.tell_of_pass("loss_scaled", lambda run: run.loss_scaled(self))
        return scaled

    return scale


def _scaler_step(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not live[0] or not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        _listeners.tell("scaler_enters", lambda run: run.scaler_enters(self, optimizer))
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:
            _listeners.tell("scaler_raised", lambda run: run.scaler_raised(self, optimizer))
            raise
        _listeners.tell("scaler_exits", lambda run: run.scaler_exits(self, optimizer))
        return result

    return step


def _next_batch(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def __next__(iterator: Any) -> Any:
        if not live[0]:
            return original(iterator)
        begin = perf_counter()
        while skipper := _listeners.find_skipper(iterator):
            original(iterator)
            skipper.record_skip()
        try:
            batch = original(iterator)
        except StopIteration:
            _listeners.tell("loader_exhausted", lambda run: run.batches.loader_exhausted(iterator))
            raise
        seconds = perf_counter() - begin
        _listeners.tell("batch_fetched", lambda run: run.batches.batch_fetched(iterator, seconds, batch))
        return batch

    return __next__


def _without_hooks(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def without_hooks(modules: Any, *args: Any, **kwargs: Any) -> Any:
        with forward_passes.aside(modules) if live[0] else contextlib.nullcontext():
            return original(modules, *args, **kwargs)

    return without_hooks


def _capture(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if live[0]:
            _listeners.tell("capturing", lambda run: run.capturing())
        return original(self, *args, **kwargs)

    return capture_begin
