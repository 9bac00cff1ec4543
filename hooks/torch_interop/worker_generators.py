"""Random generators of a data set, of which each worker of its loader gets a copy in the same state.

Torch seeds the global generators of torch, random and numpy in each worker. A generator that the data set holds is
copied with it, state and all: what one worker draws, the others draw too, and the noise of an augmentation repeats
while the samples differ (docs.pytorch.org, torch.utils.data, "Randomness in multi-process data loading"). It is looked
for in the `__dict__` of the data set, of those that it wraps, and of its transforms, and in the names that methods use:
nothing of the user's is called.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader

from sentinel.hooks.torch_interop.internals import LoaderIterator

MOST_OWNERS = 32
"""Objects whose attributes are looked at."""
WITHIN = ("dataset", "datasets", "transform", "transforms", "target_transform")
"""Attributes that hold such an object, or a list of some."""
SEEDING = frozenset(("get_worker_info", "initial_seed", "manual_seed", "seed", "reseed", "set_state", "setstate"))
"""Names in the code of a class that gives each worker, or each sample, numbers of its own."""


def list_copied_generators(source: Any) -> list[str]:
    """`Class.attribute` of each that a method other than `__init__` names, and that none sets or seeds. Of fewer than
    two workers there are none, and a `worker_init_fn` may seed them. `source`: a DataLoader, or its iterator."""
    if isinstance(source, DataLoader):
        workers, prepare, dataset = source.num_workers, source.worker_init_fn, source.dataset
    elif isinstance(source, LoaderIterator):
        workers, prepare, dataset = source._num_workers, getattr(source, "_worker_init_fn", None), source._dataset
    else:
        return []
    if workers < 2 or prepare is not None:
        return []
    kinds, shared = _find_kinds()
    found: dict[str, None] = {}
    for owner, attributes in _walk(dataset):
        for name, value in list(attributes.items()):  # other threads may add some
            kind = type(value)  # isinstance() may ask the object
            copied = issubclass(kind, kinds) and not issubclass(kind, random.SystemRandom) and id(value) not in shared
            if copied and _draws(type(owner), name):
                found[f"{type(owner).__name__}.{name}"] = None
    return list(found)


def _find_kinds() -> tuple[tuple[type, ...], set[int]]:
    """Types of generators that have a state; the ids of the global ones, which torch seeds."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    shared = {id(torch.default_generator), id(getattr(random.random, "__self__", None))}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds += (numpy.Generator, numpy.RandomState)
        shared.add(id(getattr(numpy.rand, "__self__", None)))
    return kinds, shared


def _walk(dataset: object) -> Iterator[tuple[object, dict[str, Any]]]:
    """The data set and what is within it, the outermost first, with their attributes."""
    waiting = deque([dataset])
    for _ in range(MOST_OWNERS):
        if not waiting:
            return
        owner = waiting.popleft()
        try:
            attributes = object.__getattribute__(owner, "__dict__")
        except AttributeError:  # it has slots, or is built in
            continue
        yield owner, attributes
        for held in [attributes[name] for name in WITHIN if name in attributes]:
            waiting += held[:MOST_OWNERS] if type(held) in (list, tuple) else [held]


def _draws(kind: type, attribute: str) -> bool:
    named = False
    for code in _list_methods(kind):
        if not SEEDING.isdisjoint(code.co_names):
            return False
        if attribute in code.co_names:
            named = True
            if any(one.opname == "STORE_ATTR" and one.argval == attribute for one in dis.get_instructions(code)):
                return False
    return named


def _list_methods(kind: type) -> Iterator[CodeType]:
    """Those that no subclass has overridden."""
    methods = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    for name, value in methods.items():
        if type(value) is FunctionType and name != "__init__":
            yield from _unnest(value.__code__)


def _unnest(code: CodeType) -> Iterator[CodeType]:
    """With the functions and comprehensions within it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _unnest(constant)
