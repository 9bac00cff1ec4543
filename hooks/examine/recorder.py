"""Records, for `sentinel doctor`, the order in which a loop calls things, for a few optimizer steps.

A process that is examined does nothing else, so this may look at values. It records facts and judges nothing: that is
done by `sentinel.toolkit.doctor`, on a machine that need not have torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as hooks
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import data

from sentinel.hooks.evidence import nonfinite_trace, referrers
from sentinel.hooks.examine import model_facts
from sentinel.hooks.loop.forward_passes import name_tensors
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.internals import LoaderIterator, in_backward
from sentinel.wire.examination import ExaminedLoop

_MOST_EVENTS = 512
"""Most events of one step: a loop that accumulates a thousand micro-batches shows no more than one of a hundred."""
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
"""Layers whose gradient is a product with their input."""
_SAMPLES = 4


class Examination:
    """One process under examination.

    `finish` is called with the facts after `steps` steps of the first optimizer, when the next one begins: so what
    follows the last one is seen, too.
    """

    def __init__(self, steps: int, finish: Callable[[dict[str, Any]], None]) -> None:
        self._asked, self._finish = steps, finish
        self._events: list[str] = []
        self._steps: list[list[str]] = []
        self._first: weakref.ref[Optimizer] | None = None
        self._spent: dict[int, list[Tensor]] = {}
        """id of an optimizer -> some of the gradients that it has applied."""
        self._dirty: dict[int, list[Tensor]] = {}
        """id of an optimizer -> those of them that a backward pass added to."""
        self._reached: set[int] = set()
        self._in_scaler = False
        self._depth = 0
        self._normed: Any = None
        self._product: tuple[nn.Module | None, Any] = None, None
        """The layer with weights that was called last, and its output."""
        self._drawn = ""
        """Key of the loader that the last batch came from."""
        self._exhausted: set[str] = set()
        """Keys of loaders that were read to their end."""
        self._inputs: dict[nn.Module, dict[str, float]] = {}
        self._course: dict[tuple[str, ...], list[tuple[int, float]]] = {}
        """Names in a loss's graph -> (step, value) of the first and of the last such loss, up to a loss that is not
        finite."""
        self._bad_input: dict[str, Any] | None = None
        """The first step with NaN or infinity in a batch or in the input of a model, and where."""
        self._post_norm: dict[str, set[int]] = {}
        """Class of a layer whose output is that of its norm -> ids of such layers."""
        self._loop = ExaminedLoop()
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start to record. Nothing is restored: the process ends with the examination."""
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(GradScaler, "scale", self._scale)
        self._wrap(GradScaler, "step", self._scaler_step)
        self._wrap(Optimizer, "zero_grad", self._zero_grad)
        for owner, name in ((GradScaler, "unscale_"), (GradScaler, "update")):
            self._wrap(owner, name, functools.partial(self._note_event, name))
        for name in ("_clip_grads_with_norm_", "clip_grad_value_"):
            self._wrap(clip_grad, name, functools.partial(self._note_event, "clip"))
        self._wrap(LRScheduler, "step", functools.partial(self._note_event, "scheduler"))
        for kind in _subclasses(LRScheduler):
            if "step" in vars(kind):
                self._wrap(kind, "step", functools.partial(self._note_event, "scheduler"))
        self._wrap(LRScheduler, "__init__", self._scheduler_made)
        self._wrap(data.DataLoader, "__iter__", self._loader)
        self._wrap(LoaderIterator, "__next__", self._next)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._record_step)
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)

    def facts(self, error: str = "", *, ended: bool = False) -> dict[str, Any]:
        """Return all that was seen so far."""
        seconds = time.perf_counter() - self._began
        optimizers, modules = discovery.trainers()
        loop = msgspec.structs.replace(
            self._loop,
            steps=self._steps,
            after=self._events,
            seconds=seconds,
            error=error,
            ended=ended,
            anomaly=torch.is_anomaly_enabled(),
            inputs=model_facts.name_layers(self._inputs, modules),
            post_norm={kind: len(layers) for kind, layers in self._post_norm.items()},
        )
        return {
            **msgspec.structs.asdict(loop),
            "cuda": torch.cuda.is_available(),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "torch": torch.__version__,
            **model_facts.describe_models(optimizers, modules, self._reached),
        }

    def _note(self, event: str) -> None:
        if len(self._events) < _MOST_EVENTS and not (event == "scheduler" and self._events[-1:] == [event]):
            self._events.append(event)

    @staticmethod
    def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            made = functools.wraps(original)(lambda *a, **k: wrapper(original, *a, **k))
            setattr(owner, name, made)

    def _note_event(self, event: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._note(event)
        return original(*args, **kwargs)

    def _scheduler_made(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._loop.schedulers += 1
        result = original(*args, **kwargs)  # which steps once
        if self._events[-1:] == ["scheduler"]:
            self._events.pop()
        return result

    # Losses.

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if in_backward():  # a checkpoint's own, within a backward pass
            return original(tensors, *args, **kwargs)
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if isinstance(root, Tensor):
            raw = getattr(root, "_examined_raw", root)
            self._loss(raw)
            referrers.mark_loss(raw, len(self._steps))
            del raw
        if self._drawn:
            self._loop.loaders[self._drawn]["trains"] = True
        before = {key: [(t, t._version) for t in held if t.any()] for key, held in self._spent.items()}
        self._note("backward")
        result = original(tensors, *args, **kwargs)
        for key, held in before.items():
            if added := [t for t, version in held if t._version != version]:
                self._dirty[key] = added
        return result

    def _zero_grad(self, original: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._note("zero_grad")
        self._spent.pop(id(optimizer), None)
        self._dirty.pop(id(optimizer), None)
        return original(optimizer, *args, **kwargs)

    def _loss(self, root: Tensor) -> None:
        names = _lineage(root.grad_fn)
        if root.numel() == 1 and self._loop.not_finite is None:
            self._follow_loss(float(root.detach().float()), tuple(names))
        if names[:1] and names[0].startswith(("Div", "Mul")):
            self._loop.divided += 1
        else:
            self._loop.undivided += 1
        for outer, inner in itertools.pairwise(names):
            if outer.startswith("LogSoftmax") and inner.startswith("Softmax"):
                self._loop.softmax_before_loss = True

    def _follow_loss(self, loss: float, kind: tuple[str, ...]) -> None:
        """Note a loss. Only losses of one kind are compared: a GAN's two differ by nature."""
        step, before = len(self._steps) + 1, self._course.get(kind, [])
        if math.isfinite(loss):
            self._course[kind] = [*before[:1], (step, loss)]
            return
        self._loop.not_finite = {
            "loss": loss,
            "step": step,
            "updates": len(self._loop.rates),
            "course": before,
            "input": self._bad_input,
        }

    def _search_input(self, values: Any, name: str, holder: str) -> None:
        if self._bad_input is not None:
            return
        bad = next((place for place, one in name_tensors(values, name) if nonfinite_trace.is_broken(one)), None)
        if bad is not None:
            self._bad_input = {"step": len(self._steps) + 1, "place": f"{bad} of {holder}"}

    def _scale(self, original: Any, scaler: GradScaler, outputs: Any) -> Any:
        self._note("scale" if scaler.is_enabled() else "")
        result = original(scaler, outputs)
        if isinstance(result, Tensor) and isinstance(outputs, Tensor) and result is not outputs:
            result._examined_raw = outputs  # type: ignore[attr-defined]
        return result

    def _scaler_step(self, original: Any, scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._in_scaler = True
        try:
            self._note("scaler.step")
            return original(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler = False

    # Steps.

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        dirty = {id(tensor) for tensor in self._dirty.pop(id(optimizer), ())}
        self._loop.uncleared += any(id(p.grad) in dirty for p in parameters)
        if optimizer is self._first():
            self._loop.held = referrers.find_holder(len(self._steps)) or self._loop.held
            if len(self._steps) == self._asked:
                self._finish(self.facts())
        if callable(kwargs.get("closure", next(iter(args[1:]), None))):  # torch passes the optimizer as the first
            self._loop.closure = True
        else:
            alive = sum(p.grad is not None for p in parameters)
            moved = sum(p.grad is not None and bool(p.grad.any()) for p in parameters[:: max(1, len(parameters) // 64)])
            self._loop.no_gradient.append([len(parameters), alive, moved])
        self._note("step" if not self._in_scaler else "step in scaler")
        self._loop.rates.append([float(group["lr"]) for group in optimizer.param_groups])

    def _record_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        self._reached.update(id(p) for p in own if p.grad is not None)
        held = [p.grad for p in own if p.grad is not None]
        self._spent[id(optimizer)] = [grad for grad in (*held[:_SAMPLES], *held[-_SAMPLES:]) if not grad.is_sparse]
        if self._first is None or optimizer is not self._first():
            return
        self._steps.append(self._events)
        self._events = []
        if not self._loop.waits or len(self._steps) == 1:
            self._loop.waits, self._began = [], time.perf_counter()

    # Modules and data.

    def _enter(self, module: nn.Module, args: Any) -> None:
        first = self._loop.forward is None and self._depth == 0 and torch.is_grad_enabled()
        if first and next(module.parameters(), None) is not None:  # else it is a loss, as a rule
            self._loop.forward = model_facts.describe_forward(module, args)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            with contextlib.suppress(RuntimeError):  # within torch.func.vmap a tensor has no values to read
                if self._depth == 0:
                    self._search_input(args, "args", type(module).__name__)
                if isinstance(module, _WEIGHTED) and module not in self._inputs:
                    self._inputs[module] = model_facts.data_range(module, args)
        self._depth += 1
        before, product = self._product
        if before is not None and isinstance(module, model_facts.NORMS) and args and args[0] is product:
            self._inputs[before] = {}  # the norm cancels the scale of its input

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if isinstance(module, _WEIGHTED):
            self._product = module, output
        if isinstance(module, _NORMS):
            self._normed = output
        elif output is self._normed and output is not None and not isinstance(module, nn.Sequential):
            kind = type(module).__name__
            self._post_norm.setdefault(kind, set()).add(id(module))
        if self._depth == 0:
            self._normed, self._product = None, (None, None)
            if torch.is_grad_enabled() and not _is_loss(module, args, output):
                self._note("forward" if module.training else "forward in eval")

    def _loader(self, original: Any, loader: data.DataLoader[Any]) -> Any:
        key = str(id(loader))
        if torch.is_grad_enabled() and (key in self._loop.loaders or len(self._loop.loaders) < 16):
            known = self._loop.loaders.setdefault(key, {**model_facts.describe_loader(loader), "trains": False})
            if known["trains"] and key in self._exhausted:
                self._note("epoch")
        iterator = original(loader)
        iterator._examined_key = key
        return iterator

    def _next(self, original: Any, iterator: Any) -> Any:
        key = getattr(iterator, "_examined_key", "")
        began = time.perf_counter()
        try:
            batch = original(iterator)
        except StopIteration:
            self._exhausted.add(key)
            self._drawn = ""  # the next training pass is not from this loader
            raise
        finally:
            if len(self._loop.waits) < 1024:
                self._loop.waits.append(time.perf_counter() - began)
        self._drawn = key if key in self._loop.loaders else ""
        if self._drawn:
            self._search_input(batch, "batch", "the DataLoader")
        return batch


def _is_loss(module: nn.Module, args: Any, output: Any) -> bool:
    """Whether a module computes a loss: `model.eval()` does not reach it, so its mode says nothing about the model's.

    It has no parameters, or makes one number of what a model computed (as losses with a centre for each class do).
    """
    if next(module.parameters(), None) is None:
        return True
    single = isinstance(output, Tensor) and output.numel() == 1
    return module.training and single and any(isinstance(one, Tensor) and one.requires_grad for one in args)


def _lineage(node: Any) -> list[str]:
    """Return the names of the graph's nodes from its root down, along the first inputs."""
    names: list[str] = []
    while node is not None and len(names) < 12:
        names.append(type(node).__name__)
        node = next((inner for inner, _ in node.next_functions if inner is not None), None)
    return names


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [found for one in direct for found in (one, *_subclasses(one))]


def write_and_exit(path: Path, facts: dict[str, Any]) -> None:
    """Write the facts as JSON, whole or not at all, and end the process: the script was run for these steps only."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(facts, default=str), encoding="utf-8")
    temporary.replace(path)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)
