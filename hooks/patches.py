"""The few places in PyTorch that are patched, so that a loop need not be changed to be seen.

    torch.autograd.backward              the loss: Tensor.backward looks it up there
    GradScaler.scale, .step              the loss before scaling; steps that are withheld
    clip_grad._get_total_norm,
        ._clip_grads_with_norm_          the norm before clipping, for free; and their public names
    _BaseDataLoaderIter.__next__         the wait for data
    cuda.make_graphed_callables,
    jit._recursive.create_script_module  refuse modules with hooks: ours step aside. (`jit.script` itself looks at the
                                         frame that calls it, which is to stay the user's)
    CUDAGraph.capture_begin              breaks off where another thread copies: a snapshot is brought to its end

Put in place at the first `listen`, taken away at the last `unlisten`. Where somebody patched over us in between, our
wrapper cannot be taken out from under theirs: it stays and does nothing. Each is hidden from torch.compile
(`untraced`), else it would be traced: more graph breaks, and nothing seen; but for those of clipping.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id as present_pass
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.utils.data import dataloader

from sentinel.hooks import fast_path_native, faults, forward, readout
from sentinel.hooks.clipping_patch import ClippingPatch
from sentinel.hooks.listener import Listener
from sentinel.hooks.tally import Ledger, Scalar, scalar
from sentinel.hooks.untraced import untraced

_RAW = "_sentinel_raw"
"""Attribute of a scaled loss: the loss before scaling, and the version that the scaled one had. An attribute and not a
table by id(): ids are used again."""


@dataclass(slots=True)
class _Patch:
    owner: Any
    name: str
    original: Any
    wrapper: Any
    live: list[bool]
    """Shared with the wrapper: [False] makes it pass everything through."""


_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()
_only: Ledger | None = None
"""That of the listener, where there is one and no other."""
_patches: list[_Patch] = []
_scaled_by: list[torch.Tensor] = []
"""Scale of the losses that were scaled since the last backward pass."""
_ALL_WANTED = -math.inf
"""See `Ledger.calm_to`."""
_remembers = False
"""Whether a loss was ever scaled in this process."""


def listen(listener: Listener) -> None:
    """Tell `listener` what happens, from now on."""
    with _lock:
        if not _listeners:
            _install()
        _set((*_listeners, listener))


def unlisten(listener: Listener) -> None:
    """Stop telling it. The last one out restores what was patched. No error where it did not listen."""
    with _lock:
        _set(tuple(one for one in _listeners if one is not listener))
        if not _listeners:
            _restore()


def _set(listeners: tuple[Listener, ...]) -> None:
    global _listeners, _only
    _listeners, _only = listeners, listeners[0].ledger if len(listeners) == 1 else None


def installed() -> tuple[str, ...]:
    """What is patched now, as `owner.name`."""
    return tuple(f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}" for patch in _patches)


def _install() -> None:
    clipping = ClippingPatch(_tell)
    _replace(torch.autograd, "backward", _backward)
    for kind in _with_scale_of_their_own(GradScaler):
        _replace(kind, "scale", _scale)
    _replace(GradScaler, "step", _scaler_step)
    _replace(dataloader._BaseDataLoaderIter, "__next__", _next)
    for owner in (torch.cuda, torch.cuda.graphs):
        _replace(owner, "make_graphed_callables", _without_hooks)
    _replace(torch.jit._recursive, "create_script_module", _without_hooks)
    _replace(torch.cuda.CUDAGraph, "capture_begin", _capture)
    for owner, norm, clip in (
        (clip_grad, "_get_total_norm", "_clip_grads_with_norm_"),
        (torch.nn.utils, "get_total_norm", "clip_grads_with_norm_"),
    ):
        _replace(owner, norm, clipping.total_norm, traced=True)
        _replace(owner, clip, clipping.clip, traced=True)


def _with_scale_of_their_own(kind: type[GradScaler]) -> Iterator[type[GradScaler]]:
    """FSDP's scaler has one."""
    if "scale" in vars(kind):
        yield kind
    for each in kind.__subclasses__():
        yield from _with_scale_of_their_own(each)


def _replace(owner: Any, name: str, make: Callable[[Any, list[bool]], Any], *, traced: bool = False) -> None:
    original = getattr(owner, name, None)
    if original is None:  # private names come and go; what they show is then not seen
        return
    live = [True]
    made = make(original, live)
    wrapper = functools.wraps(original)(made if traced else untraced(made))
    _patches.append(_Patch(owner, name, original, wrapper, live))
    setattr(owner, name, wrapper)


def _restore() -> None:
    for patch in reversed(_patches):
        patch.live[0] = False
        if getattr(patch.owner, patch.name) is patch.wrapper:
            setattr(patch.owner, patch.name, patch.original)
    _patches.clear()


def _tell(event: str, *arguments: Any) -> None:
    for listener in _listeners:
        try:
            getattr(listener, event)(*arguments)
        except Exception:
            faults.swallow(f"patches.{event}", "this is not seen")


def _tell_of_pass(event: str, *arguments: Any, **more: Any) -> None:
    """Of a backward pass, to the run that it is of."""
    for listener in _listeners if len(_listeners) < 2 else _concerned():
        try:
            getattr(listener, event)(*arguments, **more)
        except Exception:
            faults.swallow(f"patches.{event}", "this is not seen")


def _concerned() -> tuple[Listener, ...]:
    """Where several runs are watched, those whose model ran since their last step; all, where none is known to have
    run, as a compiled one is not."""
    try:
        return tuple(one for one in _listeners if one.model_ran()) or _listeners
    except Exception:
        faults.swallow("patches.model_ran", "passes are taken for every run's")
        return _listeners


def _backward(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # A backward inside a backward (reentrant checkpointing) is part of the outer one.
        if not live[0] or present_pass() != -1:
            return original(tensors, *args, **kwargs)
        ledger, weights = _only, args[0] if args else kwargs.get("grad_tensors")
        if ledger is not None:
            tally = ledger.tally
            # It may come after passes of its step that were thrown away, or be of another model.
            questionable = tally.backwards or not (tally.forwards or not ledger.sees_forwards)
            if questionable or weights is not None or ledger.calm_to == _ALL_WANTED:
                ledger = None
        if ledger is None:
            _tell_of_pass("backward_begins", tensors, weighted=weights is not None)
        begin = perf_counter()
        try:
            result = original(tensors, *args, **kwargs)
        except Exception as error:
            _tell_of_pass("backward_failed", error)
            raise
        seconds = perf_counter() - begin
        if ledger is None or not (
            (not _remembers and fast_path_native.backward_ended(tensors, seconds, ledger))
            or _record_plain_loss(tensors, seconds, ledger)
        ):
            _tell_of_pass("backward_ended", _loss_of(tensors, weights), seconds)
        return result

    return backward


def _record_plain_loss(root: Any, seconds: float, ledger: Ledger) -> bool:
    """Whether it is a plain loss on the host, and no surprise: then the ledger has it, and nobody need be told."""
    try:
        if type(root) is not Tensor or not root.is_cpu or (_remembers and is_scaled_pass(root)):
            return False
        loss = root.item()
        if type(loss) is not float or not loss <= ledger.calm_to or loss - loss != 0.0:  # the last: minus infinity
            return False
        ledger.backward_ended(loss, seconds)
        return True
    except Exception:  # it has several elements
        return False


def _loss_of(roots: Any, weights: Any) -> Scalar | None:
    """The sum of the roots, before scaling, times their weights (None: 1). None where one of them is no scalar, or
    nothing has been computed yet."""
    try:
        if readout.capturing():  # the copy would be part of the graph
            return None
        if isinstance(roots, torch.Tensor):  # as nearly always
            return _weighted(roots, weights) if _is_scalar(roots) else None
        total: Scalar | None = None
        several = tuple(roots.values() if isinstance(roots, dict) else roots)
        factors = weights if isinstance(weights, list | tuple) else (weights,) * len(several)
        for root, factor in zip(several, factors, strict=True):
            if not isinstance(root, torch.Tensor) or not _is_scalar(root):
                return None
            value = _weighted(root, factor)
            total = value if total is None else total + value
        return total
    except Exception:
        faults.swallow("patches.loss", "the loss is not seen")
        return None
    finally:
        if _scaled_by:
            _scaled_by.clear()


def _is_scalar(root: torch.Tensor) -> bool:
    return root.numel() == 1 and not root.is_complex()  # a pass from a complex number is no descent of it


def _weighted(root: torch.Tensor, weight: Any) -> Scalar:
    value = _unscaled(root)
    known = isinstance(weight, torch.Tensor) and _is_scalar(weight)  # else 1, or what autograd will refuse
    return value * scalar(weight) if known else value


def _unscaled(root: torch.Tensor) -> Scalar:
    raw, version = getattr(root, _RAW, (None, 0))
    if raw is not None and root._version == version:
        return scalar(raw)
    # Scaled, then divided by the number of micro-batches or added up: the result carries no attribute of ours.
    return scalar(root) / scalar(_scaled_by[0]) if _scaled_by else scalar(root)


def _scale(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if live[0] and scaled is not outputs:
            with faults.shielded("patches.scale", "losses are seen as they are scaled"):
                remember(scaled, outputs)
            _scaled_by[:] = [self._scale] if self._scale is not None else []
            _tell_of_pass("scaled", self)
        return scaled

    return scale


def remember(scaled: Any, raw: Any) -> None:
    """`scaled` is the loss `raw`, scaled: when a backward pass begins at it, the loss is `raw`."""
    global _remembers
    _remembers = True
    if isinstance(raw, torch.Tensor):
        setattr(scaled, _RAW, (raw.detach(), scaled._version))  # the latter: it may be divided in place
    elif isinstance(raw, list | tuple):
        for one, other in zip(scaled, raw, strict=True):
            remember(one, other)


def is_scaled(root: torch.Tensor) -> bool:
    """Whether it is a loss as GradScaler gave it back."""
    return hasattr(root, _RAW)


def is_scaled_pass(roots: Any) -> bool:
    """Whether a backward pass that begins is from a scaled loss, or from one that was made of such."""
    return bool(_scaled_by) or is_scaled(roots)


def _scaler_step(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not live[0] or not self.is_enabled():
            return original(self, optimizer, *args, **kwargs)
        _tell("scaler_enters", self, optimizer)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:
            _tell("scaler_raised", self, optimizer)
            raise
        _tell("scaler_exits", self, optimizer)
        return result

    return step


def _next(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:
        if not live[0]:
            return original(self)
        begin = perf_counter()
        while skipper := _skipper(self):
            original(self)
            skipper.skipped(self)
        try:
            batch = original(self)
        except StopIteration:
            _tell("loader_exhausted", self)
            raise
        _tell("batch_fetched", self, perf_counter() - begin, batch)
        return batch

    return __next__


def _skipper(iterator: object) -> Listener | None:
    """The listener that wants the next batch thrown away, if there is one."""
    try:
        return next((listener for listener in _listeners if listener.to_skip(iterator)), None)
    except Exception:
        faults.swallow("patches.to_skip", "no batch is skipped")
        return None


def _without_hooks(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def without_hooks(modules: Any, *args: Any, **kwargs: Any) -> Any:
        with forward.aside(modules) if live[0] else contextlib.nullcontext():
            return original(modules, *args, **kwargs)

    return without_hooks


def _capture(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if live[0]:
            _tell("capturing")
        return original(self, *args, **kwargs)

    return capture_begin
