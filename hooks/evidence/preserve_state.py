"""A block that may call the model, and after which the run is where it was, bit for bit.

Put back: random number generators (torch's of the CPU and the model's devices, Python's, numpy's, and those that are
attributes of modules), buffers, gradients, and the attributes of all modules with the lists, dicts, sets and deques
right in them: counters, kept outputs, caches.
Not put back: what a module changes inside objects of other kinds, or outside of itself.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sentinel.hooks.torch_interop.tensors import is_expanded


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Run a block that may call the model, and put the run back to where it was. Gradients are enabled in it."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    modules = [(module, _attributes(module)) for module in model.modules()]
    own = [state for module in model.modules() for value in vars(module).values() for state in _generators(value)]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not is_expanded(buffer)]
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


def _generators(value: Any) -> Iterator[Callable[[], object]]:
    """Puts back what is a random number generator, or one right in a container."""
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
    """(name, value, what is in it, where it is a container)."""
    return [(name, value, _contents(value)) for name, value in vars(module).items()]


def _contents(value: Any) -> Any:
    """A container's own items: of a subclass, which may have ideas of its own, none but an OrderedDict's."""
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
    """By identity: tensors have no truth in their equality."""
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is contents[b] for a, b in zip(value, contents, strict=True))
    if isinstance(value, set):
        return {id(one) for one in value} == {id(one) for one in contents}
    return all(a is b for a, b in zip(value, contents, strict=True))
