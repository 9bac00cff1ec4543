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
torch.compile (`exclude_from_tracing`), as a traced wrapper would cause more graph breaks and see nothing. Clipping may
be part of a compiled region that must not break (`fullgraph=True`): there dynamo traces through the wrappers as if they
did not exist, and the clipping is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import clip_grad
from torch.overrides import has_torch_function

from sentinel.hooks.core import faults
from sentinel.hooks.loop import forward_passes, losses
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.losses import loss_of, plain_loss
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.internals import (
    LoaderIterator,
    backward_pass_id,
    exclude_from_tracing,
    is_faking,
    script_compiler,
)
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

    def gradients_clipped(
        self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor, *, l2: bool
    ) -> None:
        """The gradients of `parameters`, whose norm was `norm`, were clipped to `max_norm`. `l2`: it is an L2 norm."""

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


_LOSSES = "losses"
"""What is not seen after a passing error, as reported to the user."""
_ALL_WANTED = -math.inf
"""The value of `StepAccumulator.fast_path_loss_limit` at which all of a step is wanted."""


class BackwardPatch:
    """Replaces `torch.autograd.backward`; `around` makes the wrapper."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners

    def around(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Return a wrapper around `original`, which does nothing once `live` is [False]."""

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # A backward inside a backward (reentrant checkpointing) is part of the outer one. Where a mode or a tensor
            # subclass handles the call first (`with torch.device(...)` is a mode), it calls this again.
            if not live[0] or backward_pass_id() != -1 or is_faking() or has_torch_function(_several(tensors)):
                return original(tensors, *args, **kwargs)
            weights = args[0] if args else kwargs.get("grad_tensors")
            accumulator = self._quiet_accumulator() if weights is None else None
            if accumulator is None:
                weighted = weights is not None
                self._listeners.tell_of_pass(
                    "backward_begins", lambda run: run.backward_begins(tensors, weighted=weighted)
                )
            begin = perf_counter()
            try:
                result = original(tensors, *args, **kwargs)
            except Exception as error:
                self._report_failure(error)
                raise
            seconds = perf_counter() - begin
            if accumulator is None:
                loss = self._read_loss(tensors, weights)
                self._listeners.tell_of_pass("backward_ended", lambda run: run.backward_ended(loss, seconds))
            else:
                self._record_end(tensors, seconds, accumulator)
            return result

        return backward

    def _report_failure(self, error: Exception) -> None:
        """Call the listeners about a pass that raised. Not in the wrapper: its frame is in the traceback, and a closure
        there would hold the error, the traceback and all activations in a cycle."""
        self._listeners.tell_of_pass("backward_failed", lambda run: run.backward_failed(error))

    def _read_loss(self, roots: Any, weights: Any) -> Scalar | None:
        try:
            loss = loss_of(roots, weights)
        except Exception:
            self._listeners.swallow(_LOSSES, "patches.loss", "the loss is not seen")
            return None
        self._listeners.recover(_LOSSES)
        return loss

    def _quiet_accumulator(self) -> StepAccumulator | None:
        """Return the accumulator that may record the pass that begins on its own; None if listeners must be called."""
        accumulator = self._listeners.accumulator
        if accumulator is None or accumulator.fast_path_loss_limit == _ALL_WANTED or accumulator.unseen.pausing:
            return None
        totals = accumulator.totals
        # The pass may follow passes of its step that were discarded, or be of another model.
        if (
            totals.backwards
            or not (totals.forwards or not accumulator.sees_forwards)
            or get_ident() != accumulator.thread
        ):
            return None
        return accumulator

    def _record_end(self, root: Any, seconds: float, accumulator: StepAccumulator) -> None:
        """End a pass that began without listeners. Where its loss is within the noise, the accumulator records it, and
        no listener is called."""
        try:
            loss = plain_loss(root)
            # The last condition excludes minus infinity.
            if loss is not None and loss <= accumulator.fast_path_loss_limit and loss - loss == 0.0:
                accumulator.backward_ended(loss, seconds)
                return
        except Exception as error:  # a loss that cannot be read
            faults.let_through(error)
        told = self._read_loss(root, None)
        self._listeners.tell_of_pass("backward_ended", lambda run: run.backward_ended(told, seconds))


def _several(roots: Any) -> tuple[Any, ...] | list[Any]:
    return roots if isinstance(roots, tuple | list) else (roots,)


class ClippingPatch:
    """Makes the two wrappers, by `total_norm` and `clip`. Each wrapper does nothing once `live` is [False]."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._norm_type = 2.0
        """Type of the last total norm: the function that clips gets the norm, not its type."""

    def total_norm(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Return a wrapper around `get_total_norm`."""

        def get_total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling() and live[0]:
                self._norm_type = float(norm_type)
            return original(tensors, norm_type, *args, **kwargs)

        return get_total_norm

    def clip(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Return a wrapper around `clip_grads_with_norm_`."""

        def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not live[0]:
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)
            result = original(parameters, max_norm, total_norm, *args, **kwargs)
            clipped = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            l2 = self._norm_type == 2.0
            self._listeners.tell(
                "gradients_clipped", lambda run: run.gradients_clipped(clipped, max_norm, total_norm, l2=l2)
            )
            return result

        return clip_grads_with_norm_
