"""Finds random generators of a data set of which each worker of its loader gets a copy in the same state.

Torch seeds the global generators of torch, random and numpy in each worker. A generator that the data set holds is
copied with it, state included: what one worker draws, the others draw too, and the noise of an augmentation repeats
while the samples differ (docs.pytorch.org, torch.utils.data, "Randomness in multi-process data loading"). It is
searched in the `__dict__` of the data set, of data sets that it wraps, and of its transforms, and in the code that
makes a sample: nothing of the user's is called. Iterable data sets are not reported: to shuffle a stream that workers
divide among them, each must draw the same numbers.
"""

from __future__ import annotations

import dis
import random
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from sentinel.hooks.core import faults
from sentinel.hooks.torch_interop.internals import LoaderIterator

MOST_OWNERS = 32
"""Most objects whose attributes are searched."""
MOST_FUNCTIONS = 64
"""Most functions of a class that are read."""
WITHIN = ("dataset", "datasets", "transform", "transforms", "target_transform")
"""Attributes that hold a wrapped data set or a transform, or a list of some."""
IN_WORKERS = ("__getitem__", "__getitems__", "__call__", "forward", "__setstate__", "__getstate__")
"""Methods that make a sample, or the copy that a worker gets. They call other methods of their class."""
SEEDING = frozenset(
    ("get_worker_info", "state", "set_state", "setstate", "bit_generator", "spawn", "jumped", "default_rng")
)
"""Names in code that gives each worker or sample its own numbers; any name with `seed` in it counts, too."""


def list_copied_generators(source: Any) -> list[str]:
    """Return `Class.attribute` of each copied generator that the code which makes a sample reads; never raises.

    Empty with fewer than two workers, with a `worker_init_fn`, as that may seed them, where such code names something
    that seeds, and where something cannot be examined. `source`: a DataLoader, or its iterator.
    """
    try:
        if isinstance(source, DataLoader):
            workers, prepare, dataset = source.num_workers, source.worker_init_fn, source.dataset
        elif isinstance(source, LoaderIterator):
            workers, prepare, dataset = source._num_workers, getattr(source, "_worker_init_fn", None), source._dataset
        else:
            return []
        return _look_into(dataset) if workers >= 2 and prepare is None else []
    except Exception as error:  # of a loader with computed attributes, or of a stub in place of numpy
        faults.let_through(error)
        return []


def count_workers(source: Any) -> int:
    """Return the number of workers of a DataLoader, or of its iterator."""
    workers: int = source.num_workers if isinstance(source, DataLoader) else source._num_workers
    return workers


def _look_into(dataset: object) -> list[str]:
    owners = list(_walk(dataset))
    classes = {type(owner) for owner, _ in owners}
    held = [(type(owner), name) for owner, attributes in owners for name in _list_generators(attributes)]
    if not held or any(issubclass(kind, IterableDataset) for kind in classes):
        return []
    read: set[tuple[type, str]] = set()
    stored: set[str] = set()
    for kind in classes:
        for code, own in islice(_read_methods(kind), MOST_FUNCTIONS):
            if any(name in SEEDING or "seed" in name.lower() for name in code.co_names):
                return []
            read |= {(kind, name) for name in own}
            stored |= {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
    found = [f"{kind.__name__}.{name}" for kind, name in held if (kind, name) in read and name not in stored]
    return list(dict.fromkeys(found))


def _list_generators(attributes: dict[str, Any]) -> list[str]:
    """Return the names of generators with a state, except for the global ones, which torch seeds."""
    kinds, shared = _find_kinds()
    return [
        name
        for name, value in list(attributes.items())  # other threads may add some
        if issubclass(type(value), kinds)  # isinstance() might call code of the object
        and not issubclass(type(value), random.SystemRandom)
        and id(value) not in shared
    ]


def _find_kinds() -> tuple[tuple[type, ...], set[int]]:
    """Return the types of generators with a state, and the ids of the global ones, which torch seeds."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    shared = {id(torch.default_generator), id(getattr(random.random, "__self__", None))}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kinds += (numpy.Generator, numpy.RandomState)
        shared.add(id(getattr(numpy.rand, "__self__", None)))
    return kinds, shared


def _walk(dataset: object) -> Iterator[tuple[object, dict[str, Any]]]:
    """Yield the data set and the objects in it, the outermost first, with their attributes."""
    waiting = deque([dataset])
    for _ in range(MOST_OWNERS):
        if not waiting:
            return
        owner = waiting.popleft()
        try:
            attributes = object.__getattribute__(owner, "__dict__")
        except AttributeError:  # an object with slots, or a built-in one
            continue
        yield owner, attributes
        for held in [attributes[name] for name in WITHIN if name in attributes]:
            waiting += held[:MOST_OWNERS] if type(held) in (list, tuple) else [held]


def _read_methods(kind: type) -> Iterator[tuple[CodeType, set[str]]]:
    """Yield the code of a class that runs in workers, and the attributes of `self` that it reads."""
    names = list(IN_WORKERS)
    for name in names:
        for method in _list_code(kind, name):
            for code in _unnest(method):
                own = _list_own(code, method.co_varnames[:1])
                yield code, own
                names += sorted(own.difference(names))


def _list_code(kind: type, name: str) -> Iterator[CodeType]:
    """Yield a method's or property's code, also a base class's if `super()` is called, and that under a decorator."""
    for base in kind.__mro__:
        member: Any = vars(base).get(name)
        if type(member) is property:
            member = member.fget
        elif type(member) in (staticmethod, classmethod):
            member = member.__func__
        asks_base = member is None
        while type(member) is FunctionType:
            yield member.__code__
            asks_base |= "super" in member.__code__.co_names
            member = vars(member).get("__wrapped__")
        if not asks_base:
            return


def _unnest(code: CodeType) -> Iterator[CodeType]:
    """Yield the code, and that of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _unnest(constant)


def _list_own(code: CodeType, me: tuple[str, ...]) -> set[str]:
    """Return names that are read from the variable `me`. Python 3.13 loads two variables in one instruction."""
    steps = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    return {
        read.argval
        for loaded, read in pairwise(steps)
        if read.opname in ("LOAD_ATTR", "LOAD_METHOD")
        and ("FAST" in loaded.opname or "DEREF" in loaded.opname)
        and (loaded.argval[-1:] if type(loaded.argval) is tuple else (loaded.argval,)) == me
    }
