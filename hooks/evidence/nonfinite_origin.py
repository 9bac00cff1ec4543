"""Finds where the first non-finite value came from, by running the step's batch through the model once more.

The model is called as the loop called it, without its wrappers: nothing is reduced, compiled parts run eagerly, and
reentrant checkpoints run as non-reentrant ones. The backward pass begins with the gradients that came back to the
outputs. It uses `torch.autograd.grad`, and so adds to no gradient and calls nothing that waits for one. Gradients of
parameters are discarded as they are made; the pass needs the training's own memory, and that of one gradient more.

`preserve_state` puts the run back to where it was, bit for bit: random number generators (torch's of the CPU and the
model's devices, Python's, numpy's, and those that are attributes of modules), buffers, gradients, and the attributes of
all modules with the lists, dicts, sets and deques directly in them: counters, kept outputs, caches. It does not restore
what a module changes inside other objects, or outside of itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from sentinel.hooks.core import faults
from sentinel.hooks.core.host_memory import memory_left
from sentinel.hooks.evidence.nonfinite_trace import (
    Trace,
    TracedCollective,
    TraceEvent,
    finite,
    is_broken,
    label,
    storages,
)
from sentinel.hooks.loop.forward_passes import CapturedCall, differentiable, leaves, name_tensors
from sentinel.hooks.torch_interop.internals import in_backward, preserve_version
from sentinel.hooks.torch_interop.layer_table import _is_fsdp, local, nbytes_of, plain_name, unwrap_model
from sentinel.hooks.torch_interop.tensors import is_expanded
from sentinel.wire.evidence import Provenance

SECONDS = 20.0
"""Time after which the rest of the pass is not looked at."""
NAMES = 16
"""Most weights or inputs that an answer lists."""
SPARE = 0.2
"""Share of the memory that is left free."""
_UNSEEN = "is not finite, and no operation that was seen made it"
_CONSTANT = "the loss's own gradient, which is not held where it is large or steps are short: a constant stood for it"


def trace_origin(
    model: nn.Module, kept: CapturedCall | None, seq: int, *, loss_finite: bool, refuse_collectives: bool
) -> Provenance:
    """Run the kept call again and follow what is not finite to its origin. Never raises.

    `refuse_collectives`: stop at a collective, as other ranks do not run their batches again. `loss_finite`: of the
    loop's own loss.
    """
    began = time.perf_counter()
    weights: dict[str, Any] = {}
    try:
        inner = unwrap_model(model)
        weights = _weights(inner)
        if reason := _obstacle(inner, kept):
            found = Provenance(seq=seq, origin="not known", missing=(reason,), **weights)
        else:
            assert kept is not None
            fields = _Rerun(inner, kept, refuse_collectives=refuse_collectives, deadline=began + SECONDS).fields(
                loss_finite
            )
            found = Provenance(seq=seq, **(weights | fields))
    except TracedCollective as error:
        reason = f"the model's forward or backward pass communicates ({error}), which a rank cannot do alone"
        found = Provenance(seq=seq, origin="not known", missing=(reason,), **weights)
    except Exception as error:
        faults.let_through(error)
        reason = f"the model could not be run once more: {type(error).__name__}: {str(error)[:200]}"
        found = Provenance(seq=seq, origin="not known", missing=(reason,), **weights)
    return msgspec.structs.replace(found, seconds=round(time.perf_counter() - began, 3))


class _Rerun:
    """One forward and one backward pass under a trace."""

    def __init__(self, model: nn.Module, kept: CapturedCall, *, refuse_collectives: bool, deadline: float) -> None:
        self._model, self._kept = model, kept
        self._inputs = [*name_tensors(kept.args, "args"), *name_tensors(kept.kwargs, "kwargs")]
        own = [*_name_weights(model)]
        self._weights = {name for name, _ in own}
        self._trace = Trace(
            storages(iter([*own, *self._inputs])), refuse_collectives=refuse_collectives, deadline=deadline
        )

    def fields(self, loss_finite: bool) -> dict[str, Any]:
        """Run the passes, and return the fields of a Provenance."""
        with preserve_state(self._model), _eager(), _unreentrant():
            self._kept.seed()
            # Anomaly detection is in force as soon as its object is made, not from the block on, and ends with the
            # block.
            with self._trace, _name_modules(self._model, self._trace), torch.autograd.set_detect_anomaly(True, False):
                outputs = self._forward()
            # A finite loss shows that minus infinity in the outputs is a mask.
            bad = [one for one in outputs if (is_broken(one) if loss_finite else not finite(one))]
            event = next((e for one in bad if (e := self._trace.origin(one))), None)
            if event is not None:
                return self._describe_event(event)
            if self._trace.late:
                return _unknown(f"the forward pass took over {SECONDS:g} s with every operation looked at")
            if bad:
                return _unknown(f"an output of the model {_UNSEEN}: the model may return an input as it is")
            if not loss_finite and not outputs:
                return _unknown("the outputs of the model are in an object of a class that is not looked into")
            if not loss_finite:
                return {"origin": "loss", "phase": "forward", "inputs_finite": True}
            return self._backward(outputs)

    def _forward(self) -> list[Tensor]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in self._kept.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            return leaves(self._model(*self._kept.args, **self._kept.kwargs))

    def _backward(self, outputs: list[Tensor]) -> dict[str, Any]:
        outputs = differentiable(outputs)
        gradients, missing = self._gradients(outputs)
        if not all(map(finite, gradients)):
            return {"origin": "loss", "phase": "backward", "inputs_finite": True}
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        if not outputs or not parameters:
            return {"origin": "nothing", "missing": ("the outputs depend on no parameter that trains",)}
        origins = self._find_origins(outputs, parameters, gradients)
        event = next((one for one in origins if one is not None), None)
        if event is not None:
            return self._describe_event(event) | {"missing": missing}
        if origins:
            late = f"the backward pass took over {SECONDS:g} s with every operation looked at"
            return _unknown(late if self._trace.late else f"a gradient {_UNSEEN}")
        return {"origin": "nothing", "missing": missing}

    def _gradients(self, outputs: list[Tensor]) -> tuple[list[Tensor], tuple[str, ...]]:
        held = self._kept.gradients
        if self._kept.outputs == len(outputs) and all(
            held[place].shape == one.shape for place, one in enumerate(outputs) if place in held
        ):
            zeros = [held[place] if place in held else torch.zeros_like(one) for place, one in enumerate(outputs)]
            return zeros, ()
        seeds = [torch.full_like(one, 1 / max(one.numel(), 1)) for one in outputs]
        return seeds, (_CONSTANT,)

    def _find_origins(
        self, outputs: list[Tensor], parameters: Sequence[Tensor], gradients: list[Tensor]
    ) -> list[TraceEvent | None]:
        """Run the backward pass; return the origin, where known, of each parameter's gradient that is not finite."""
        found: list[TraceEvent | None] = []

        def look(gradient: Tensor) -> Tensor:
            if not finite(gradient):
                found.append(self._trace.origin(gradient))
            return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)

        handles = [parameter.register_hook(look) for parameter in parameters]  # type: ignore[no-untyped-call]
        try:
            with self._trace:
                torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _describe_event(self, event: TraceEvent) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "origin": "operation",
            "phase": "backward" if event.backward else "forward",
            "module": event.module,
            "kind": event.kind,
            "operation": event.operation,
            "line": event.line,
            "inputs_finite": not event.source,
        }
        if event.source in self._weights:
            return fields | {"origin": "weights", "tensors": (event.source,), "inputs_finite": True}
        if any(event.source == name for name, _ in self._inputs):
            bad = tuple(name for name, tensor in self._inputs if not finite(tensor))
            return fields | {"origin": "data", "tensors": bad[:NAMES]}
        return fields


def _obstacle(model: nn.Module, kept: CapturedCall | None) -> str:
    """Return why the batch cannot be run again; empty if it can."""
    if any(_is_fsdp(type(module)) for module in model.modules()):
        return "under FSDP the parameters are gathered by all ranks at once, and one alone cannot run its batch again"
    if any(local(parameter) is not parameter for parameter in model.parameters()):
        return "the parameters are spread over ranks, and one alone cannot run its batch again"
    if kept is None:
        return "no call of the model was held: its batch is large or has a graph, or the whole step is compiled"
    if not kept.unchanged:
        return "the batch was written into after the model had it"
    parameters = list(model.parameters())
    needed = sum(map(nbytes_of, (*parameters, *model.buffers())))
    left = _find_memory_left(parameters)
    if needed > left * (1 - SPARE):
        return f"a second run wants {needed / 1e6:.0f} MB beside the step's memory, and {left / 1e6:.0f} MB are left"
    return ""


def _find_memory_left(parameters: list[nn.Parameter]) -> float:
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type != "cuda":
        return memory_left()[0]
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _name_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield plain_name(name), tensor


def _weights(model: nn.Module) -> dict[str, Any]:
    states = {plain_name(name): finite(local(tensor)) for name, tensor in model.named_parameters()}
    names = list(states)
    bad = [name for name in names if not states[name]]
    prefix = 0 < len(bad) < len(names) and bad == names[: len(bad)]
    buffers = [plain_name(name) for name, tensor in model.named_buffers() if not finite(local(tensor))]
    return {
        "weights_finite": not bad,
        "bad_weights": tuple(bad[:NAMES]),
        "bad_weight_count": len(bad),
        "between": (bad[-1], names[len(bad)]) if prefix else (),
        "bad_buffers": tuple(buffers[:NAMES]),
    }


@contextlib.contextmanager
def _name_modules(model: nn.Module, trace: Trace) -> Iterator[None]:
    """Let the trace know which module runs, and the nodes of the graph which module they belong to."""
    handles = []
    for name, module in model.named_modules():
        own = (plain_name(f"{name}.").rstrip("."), type(module).__name__)

        def enter(*_: object, own: tuple[str, str] = own) -> None:
            if not in_backward():
                trace.modules.append(own)

        def leave(_: object, args: object, output: object, own: tuple[str, str] = own) -> None:
            if not in_backward():
                trace.modules.pop()
                label(leaves(output), own)

        with contextlib.suppress(RuntimeError):  # a scripted module takes no hooks
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled parts as they are written. Where dynamo was not loaded there are none, and loading it takes long."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _unreentrant() -> Iterator[None]:
    """Run reentrant checkpoints as others. They need `backward`, which adds to gradients and triggers what waits for
    them."""

    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    checkpoint.CheckpointFunction.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        del checkpoint.CheckpointFunction.apply


def _unknown(reason: str) -> dict[str, Any]:
    return {"origin": "not known", "missing": (reason,)}


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Run a block that may call the model, then restore the run's state. Gradients are enabled in it."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    modules = [(module, _attributes(module)) for module in model.modules()]
    own = [state for module in model.modules() for value in vars(module).values() for state in _generators(value)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_expanded(buffer)]
    versions = contextlib.ExitStack()
    for buffer, _ in buffers:
        versions.enter_context(preserve_version(buffer))
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    numpy = sys.modules.get("numpy")
    drawn = (torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)
    on_devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
        if numpy:
            numpy.random.set_state(drawn[2])
        for device, state in on_devices:
            torch.cuda.set_rng_state(state, device)
        for put_back in own:
            put_back()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for module, attributes in modules:
            _put_back(module, attributes)
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)
        versions.close()  # a graph that the loop still needs may have saved the buffers


def _generators(value: Any) -> Iterator[Callable[[], object]]:
    """Yield functions that restore a random number generator, or those directly in a container."""
    held = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else (value,)
    for one in held:
        if isinstance(one, torch.Generator):
            yield functools.partial(one.set_state, one.get_state())
        elif isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):  # which has no state
            yield functools.partial(one.setstate, one.getstate())
        elif type(one).__module__.startswith("numpy.random"):
            if isinstance(state := getattr(getattr(one, "bit_generator", one), "state", None), dict):
                yield functools.partial(setattr, getattr(one, "bit_generator", one), "state", copy.deepcopy(state))
            elif hasattr(one, "set_state"):  # a RandomState
                yield functools.partial(one.set_state, one.get_state())


def _attributes(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Return (name, value, its contents if it is a container) of each attribute."""
    return [(name, value, _contents(value)) for name, value in vars(module).items()]


def _contents(value: Any) -> Any:
    """Copy a container; None for others, and for subclasses that may behave otherwise, except those of dict."""
    return value.copy() if isinstance(value, dict) or type(value) in (list, set, deque) else None


def _put_back(module: nn.Module, attributes: list[tuple[str, Any, Any]]) -> None:
    now = vars(module)
    for name in now.keys() - {name for name, _, _ in attributes}:
        del now[name]
    for name, value, contents in attributes:
        if now.get(name, now) is not value:
            now[name] = value
        if contents is not None and not _same(value, contents):
            value.clear()
            value.extend(contents) if isinstance(value, list | deque) else value.update(contents)


def _same(value: Any, contents: Any) -> bool:
    """Compare by identity: tensors have no truth value when compared."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is contents[b] for a, b in zip(value, contents, strict=True))
    if isinstance(value, set):
        return {id(one) for one in value} == {id(one) for one in contents}
    return all(a is b for a, b in zip(value, contents, strict=True))
