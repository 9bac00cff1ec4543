"""Finds what holds objects that grow from step to step, by two counts some steps apart.

    containers   lists, dicts, sets and deques that are the same at both counts and hold more; without garbage
                 collection, those alone that variables and attributes name
    names        variables and attributes within reach: tensors that are larger, or end a longer chain of graph nodes
                 (`mean = 0.9 * mean + 0.1 * loss`), and containers that are made again each time (`kept = kept + [x]`)

`census` is a generator: each step of it takes some 10 ms, and the training loop goes on in between. It holds nothing
but the containers that grew meanwhile. What lies in C++ is not seen: buffers of data loaders, what graph nodes saved.

`ObjectGrowth` runs it in the pauses between steps, for a tenth of the time at most.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn

from sentinel import wire
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import is_passing
from sentinel.hooks.core.host_memory import memory_left
from sentinel.hooks.evidence.nonfinite_trace import library
from sentinel.hooks.evidence.referrers import (
    attributes,
    describe_frame,
    find_hooked_module,
    frames,
    is_a,
    locals_of,
    name_of,
)
from sentinel.hooks.loop.forward_passes import CallSlot
from sentinel.hooks.torch_interop.discovery import list_instances
from sentinel.hooks.torch_interop.tensors import storage_address, storage_bytes
from sentinel.wire.evidence import Census, Holder

GAP_STEPS = 32
"""Steps between the two counts."""
LEAST = 8
"""Fewest entries of a container that is counted."""
NAMED = 6
"""Most holders that are named: those with the most bytes."""
NEWEST = 16
"""Number of newest entries that are weighed."""
NODES = 20_000
WALK_SECONDS = 0.2
"""Limits of one walk along a chain of graph nodes."""
MOST_YOUNG = 10_000
"""Highest threshold of the garbage collector's young generation at which all objects are searched."""
_NAMED_ALONE = (
    "containers that only other containers or closures hold: the garbage collector is off or runs rarely, and a search "
    "of all objects would disturb other threads"
)
_KINDS = frozenset({list, dict, set, deque, OrderedDict, defaultdict})


class _Size(NamedTuple):
    """Size of a value that has a name."""

    size: int
    """Bytes."""
    entries: int = 0
    nodes: int = 0
    """Number of nodes of the graph that ends in the value."""
    container: int = 0
    """id of the container; 0: the value is a tensor."""
    tensors: bool = False


_Sizes = dict[tuple[str, str, str], _Size]
"""Sizes by (name, what it is, file)."""


def census(seq: Callable[[], int], models: Callable[[], list[nn.Module]]) -> Generator[int, None, Census]:
    """Count twice and return what grew. Yields how many steps to wait before going on, 0: none.

    `seq` returns the sequence number of the last finished step.
    """
    began, first = time.perf_counter(), seq()
    complete = _are_young_few()
    lengths = _lengths()
    yield 0
    sizes = _sizes()
    yield GAP_STEPS
    steps = max(seq() - first, 1)
    complete = complete and _are_young_few()
    grown = _list_grown(lengths, steps)
    tensors, held = _tensors()
    yield 0
    found = _by_name(sizes, _sizes(), steps)
    for container, more in grown[:NAMED]:
        naming = name_of(container)
        while True:
            yield 0
            try:
                next(naming)
            except StopIteration as end:
                name, line = end.value
                break
        if not _ours(name):
            found.append(_holder(container, more, steps, name, line, models()))
    found.sort(key=lambda holder: (not holder.graph, not holder.tensors, -holder.bytes_per_step))
    return Census(
        seq=seq(), steps=steps, holders=tuple(_distinct(found)), tensors=tensors, tensor_bytes=held,
        seconds=round(time.perf_counter() - began, 3), missing=() if complete else (_NAMED_ALONE,),
    )  # fmt: skip


def _are_young_few() -> bool:
    """Whether the garbage collector runs so often that the young objects are few."""
    return gc.isenabled() and 0 < gc.get_threshold()[0] <= MOST_YOUNG


def _list_containers() -> list[Any]:
    """List the containers of this process; if all of its objects may be young, those of the names within reach.

    The young objects first, and alone: among them are the tuples that other threads are filling at this moment, and
    `tuple(generator)` ends with a SystemError where anything else refers to its tuple. So nothing holds them for long.
    """
    if not _are_young_few():
        named = (value for _, _, values in _names() for value in values.values() if type(value) in _KINDS)
        return list({id(value): value for value in named}.values())
    return [
        one
        for generation in range(len(gc.get_threshold()))
        for one in [young for young in gc.get_objects(generation) if type(young) in _KINDS]
    ]


def _lengths() -> dict[int, int]:
    return {id(one): len(one) for one in _list_containers() if len(one) >= LEAST}


def _list_grown(before: dict[int, int], steps: int) -> list[tuple[Any, int]]:
    """List (container, entries gained), those with the heaviest newest entries first."""
    found = []
    for one in _list_containers():
        if one is not before:
            more = len(one) - before.get(id(one), len(one))
            if more >= max(steps // 4, 1) and more <= len(one):
                found.append((one, more))
    return sorted(found, key=lambda pair: -sum(map(_weight, _newest(pair[0]))))[: 2 * NAMED]


def _holder(container: Any, more: int, steps: int, name: str, line: str, models: list[nn.Module]) -> Holder:
    newest = _newest(container)
    inside = [tensor for entry in newest for tensor in _inside(entry)]
    bytes_each = sum(map(_weight, newest)) / max(len(newest), 1)
    owner = _hook_of(container, models)
    return Holder(
        name=name or f"a {type(container).__name__} that no name was found for",
        kind=type(container).__name__,
        line=line,
        length=len(container),
        entries_per_step=more / steps,
        bytes_per_step=bytes_each * more / steps,
        tensors=bool(inside),
        graph=any(tensor.grad_fn is not None for tensor in inside),
        example=_describe_tensor(inside[0]) if inside else type(newest[0]).__name__ if newest else "",
        hook=owner,
    )


def _hook_of(container: Any, models: list[nn.Module]) -> str:
    """Return the module whose hook holds the container, in its closure or as an attribute; empty if none does."""
    for model in models:
        for module in model.modules():
            for function in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                cells = getattr(function, "__closure__", None) or ()
                held = [_contents(cell) for cell in cells]
                held += list((attributes(getattr(function, "__self__", function)) or {}).values())
                if any(one is container for one in held):
                    return find_hooked_module(function, models)
    return ""


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _by_name(before: _Sizes, after: _Sizes, steps: int) -> list[Holder]:
    found = []
    for key, now in after.items():
        old = before.get(key)
        if old is None or (now.container and now.container == old.container):  # counted as a container
            continue
        longer = now.nodes - old.nodes >= max(steps // 2, 1)
        larger = 0 < old.size < now.size - steps or now.entries - old.entries >= max(steps // 4, 1)
        if longer or larger:
            found.append(
                Holder(
                    name=f"{key[0]}, {key[1]}", kind="tensor" if not now.container else "container", line=key[2],
                    length=now.entries, entries_per_step=(now.entries - old.entries) / steps,
                    bytes_per_step=(now.size - old.size) / steps, tensors=now.tensors, graph=longer,
                    nodes=now.nodes, nodes_per_step=(now.nodes - old.nodes) / steps,
                )
            )  # fmt: skip
    return found


def _sizes() -> _Sizes:
    """Return the sizes of all names within reach: variables of frames and user modules, and their attributes."""
    found: _Sizes = {}
    for owner, (what, line), values in _names():
        for name, value in values.items():
            key = (f"{owner}{name}", what, line.rpartition(":")[0])
            if is_a(value, Tensor):
                found[key] = _Size(storage_bytes(value), nodes=_nodes(value), tensors=True)
            elif type(value) in _KINDS and value:
                newest = _newest(value)
                size = sum(map(_weight, newest)) * len(value) // len(newest)
                found[key] = _Size(size, len(value), container=id(value), tensors=any(map(_any_inside, newest)))
    return found


def _names() -> Iterator[tuple[str, tuple[str, str], dict[str, Any]]]:
    seen: set[int] = set()
    for frame in frames():
        values = locals_of(frame)
        if frame.f_code.co_name == "<module>" and id(frame.f_globals) in seen:
            continue
        seen.add(id(frame.f_globals)) if frame.f_code.co_name == "<module>" else None
        yield "", describe_frame(frame), values
        yield from _attributes(values, seen)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if _users(file) and id(vars(module)) not in seen:
            yield "", (f"a variable of module {module.__name__}", f"{file}:0"), dict(vars(module))
            yield from _attributes(vars(module), seen)


def _users(file: str) -> bool:
    """Whether it is the user's own code: not of PyTorch, an installed package or the standard library."""
    standard = types.__file__.rpartition("/")[0]
    return file.endswith(".py") and not library(file) and "site-packages" not in file and not file.startswith(standard)


def _attributes(values: dict[str, Any], seen: set[int]) -> Iterator[tuple[str, tuple[str, str], dict[str, Any]]]:
    for value in list(values.values()):
        held = attributes(value)
        if held and id(value) not in seen and not is_a(value, types.FunctionType, Tensor):
            seen.add(id(value))
            kind = type(value)
            yield f"{kind.__name__}.", (f"an attribute of a {kind.__module__}.{kind.__qualname__}", ":0"), dict(held)


def _nodes(tensor: Tensor) -> int:
    """Count the nodes of the graph that ends here, up to the limits."""
    waiting, seen, end = [tensor.grad_fn], set[Any](), time.perf_counter() + WALK_SECONDS
    while waiting and len(seen) < NODES and time.perf_counter() < end:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
    return len(seen)


def _tensors() -> tuple[int, int]:
    """Return the number of tensors, and the bytes of their storages, each counted once."""
    tensors = list_instances(Tensor)
    storages = {storage_address(one): storage_bytes(one) for one in tensors}
    return len(tensors), sum(storages.values())


def _newest(container: Any) -> list[Any]:
    if isinstance(container, set):
        return list(itertools.islice(container, NEWEST))
    return list(itertools.islice(reversed(container.values() if isinstance(container, dict) else container), NEWEST))


def _inside(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if is_a(value, Tensor):
        yield value
    elif depth and is_a(value, dict):
        for one in list(value.values())[:NEWEST]:
            yield from _inside(one, depth - 1)
    elif depth and is_a(value, list, tuple, set, deque):
        for one in itertools.islice(value, NEWEST):
            yield from _inside(one, depth - 1)
    elif depth and not is_a(value, types.FunctionType):
        yield from _inside(attributes(value) or (), depth - 1)


def _any_inside(value: Any) -> bool:
    return next(_inside(value), None) is not None


def _weight(value: Any) -> int:
    """Return the bytes: of tensors those of their storages, of arrays theirs, of all else what Python says."""
    tensors = {storage_address(tensor): storage_bytes(tensor) for tensor in _inside(value)}
    return sum(tensors.values()) or int(_array_bytes(value) or sys.getsizeof(value, 0))


def _array_bytes(value: Any) -> int:
    numpy = sys.modules.get("numpy")
    return int(value.nbytes) if numpy is not None and is_a(value, numpy.ndarray) else 0


def _describe_tensor(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


def _ours(name: str) -> bool:
    return "module sentinel." in name or "a sentinel." in name or "of sentinel." in name


def _distinct(found: list[Holder]) -> list[Holder]:
    """Keep the first holder of each name."""
    return list({holder.name: holder for holder in reversed(found)}.values())[::-1][:NAMED]


SHARE = 0.1
"""Largest share of the loop's time."""
LEAST_STEPS = 8
"""Fewest steps between the two counts, if the run ends between them."""
LAST_SECONDS = 1.0
"""Longest time for the rest of a census when the run ends. The daemon waits a little longer."""
SHORT_STEPS = 64
"""If the host's memory will not last for this many more steps, the second count does not wait."""
SHORT_GAP_STEPS = 3
"""Fewest steps between the two counts in that case."""
_TOO_SHORT = "who holds it: the run ended before what Python holds had been counted a second time"


class ObjectGrowth:
    """Runs a census between steps. Call `ask` on any thread, `advance` on the training thread."""

    def __init__(self, slots: Sequence[CallSlot], send: Callable[[wire.Message], None]) -> None:
        """`slots`: those of the models."""
        self.asked = False
        self._slots, self._send = slots, send
        self._run: Generator[int, None, Census] | None = None
        self._seq = self._next_seq = self._first = 0
        self._not_before = 0.0
        self._left_at_first = math.inf
        """Bytes of the host's memory left at the first count."""

    def ask(self) -> None:
        """Begin a census at the next step, unless one is under way."""
        self.asked = True

    def advance(self, seq: int) -> None:
        """Go on with the census after step `seq`, unless it waits for a later step."""
        now = time.perf_counter()
        self._seq = seq
        if self._run is not None and self._is_short_of_memory():
            self._finish()
            return
        if seq < self._next_seq or now < self._not_before:
            return
        self._part()
        spent = time.perf_counter() - now
        self._not_before = now + spent / SHARE

    def conclude(self) -> None:
        """Send what the daemon asked for, as far as it is known, as the run ends."""
        if self._run is not None and self._seq - self._first >= LEAST_STEPS:
            self._finish()

    def _is_short_of_memory(self) -> bool:
        steps, left = self._seq - self._first, memory_left()[0]
        return steps >= SHORT_GAP_STEPS and (self._left_at_first - left) / steps * SHORT_STEPS > left

    def _finish(self) -> None:
        until = time.perf_counter() + LAST_SECONDS
        while self.asked and time.perf_counter() < until:
            self._part()

    def decline(self, seq: int) -> None:
        """Answer that nothing more can be counted."""
        if self.asked:
            self._end()
            self._tell(Census(seq=seq, steps=0, missing=(_TOO_SHORT,)))

    def _part(self) -> None:
        if self._run is None:
            self._run, self._first = census(lambda: self._seq, self.models), self._seq
            self._left_at_first = memory_left()[0]
        try:
            self._next_seq = self._seq + next(self._run)
        except StopIteration as end:
            self._end()
            self._tell(end.value)
        except Exception as error:
            self._end()
            faults.let_through(error)
            if not is_passing(error):
                faults.swallow("the census of tensors", "without it")
            self._tell(Census(seq=self._seq, steps=0, missing=(f"who holds it: {faults.describe(error)}",)))

    def _tell(self, found: Census) -> None:
        self._send(wire.Collected(what="census", seq=found.seq, content=msgspec.to_builtins(found)))

    def _end(self) -> None:
        self._run, self.asked = None, False
        self._next_seq = 0

    def models(self) -> list[nn.Module]:
        """The models that are still alive."""
        return [model for slot in self._slots if (model := slot.model()) is not None]
