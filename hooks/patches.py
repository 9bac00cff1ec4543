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
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.utils.data import dataloader

from sentinel.hooks import faults, forward, losses
from sentinel.hooks.backward_patch import BackwardPatch
from sentinel.hooks.clipping_patch import ClippingPatch
from sentinel.hooks.listener import Listener
from sentinel.hooks.loader_patch import LoaderPatch
from sentinel.hooks.untraced import untraced


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
_patches: list[_Patch] = []
_direct: tuple[BackwardPatch, LoaderPatch] | tuple[()] = ()
"""Those that note what is usual themselves, and tell of the rest."""


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
    global _listeners
    _listeners = listeners
    for patch in _direct:
        patch.serve(listeners[0] if len(listeners) == 1 else None)


def installed() -> tuple[str, ...]:
    """What is patched now, as `owner.name`."""
    return tuple(f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}" for patch in _patches)


def _install() -> None:
    global _direct
    _direct = backward, loader = BackwardPatch(_tell_of_pass), LoaderPatch(_tell, _skipper)
    clipping = ClippingPatch(_tell)
    _replace(torch.autograd, "backward", backward.around)
    for kind in _with_scale_of_their_own(GradScaler):
        _replace(kind, "scale", _scale)
    _replace(GradScaler, "step", _scaler_step)
    _replace(dataloader._BaseDataLoaderIter, "__next__", loader.around)
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


def _scale(original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if live[0] and scaled is not outputs:
            with faults.shielded("patches.scale", "losses are seen as they are scaled"):
                losses.remember(scaled, outputs)
            losses.scaled.by[:] = [self._scale] if self._scale is not None else []
            _tell_of_pass("scaled", self)
        return scaled

    return scale


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
