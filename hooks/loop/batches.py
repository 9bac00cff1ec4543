"""Watches the run's batches: the wait for each, its identity, and which are skipped after a rollback.

    identity   48 bits of a hash over up to 64 elements of each tensor, from all of its parts, with type and shape. The
               same batch has the same identity in every run; its content does not leave the process
    repeated   1 where one of the last `REMEMBERED` batches examined in this epoch had the same identity: workers that
               draw the same numbers, or each give the whole of a stream
    copied     number of random generators that the workers have copies of (`worker_generators.py`)

Tensors in host memory are read; of those on a device only the shape is, since reading one would wait for it.

Loops may fetch one batch ahead of the one they train on, to know which is the last: Accelerate and the Hugging Face
Trainer always, Lightning where the loader has no length. The notes on a batch are then passed on at the next fetch,
when the loop gets the batch (`FetchAhead`).
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import itertools
import random
import sys
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
from torch.utils.data import DataLoader

from sentinel.hooks.core.identity import printable
from sentinel.hooks.loop.forward_passes import find_dict, read_sequence
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.layer_table import is_wrapper_tensor
from sentinel.hooks.torch_interop.tensors import dense
from sentinel.hooks.torch_interop.worker_generators import count_workers, list_copied_generators

Batch = TypeVar("Batch")
_IDENTITY = "the identity of batches"
"""What is not seen where batches cannot be examined, as reported to the user."""


FRAMES = 12
"""Most frames between the loader and the code that fetches ahead."""
_ACCELERATE = "accelerate.data_loader"
_FETCHERS = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")

Noted = dict[str, float] | None


class FetchAhead:
    """Notes on batches that the loop has yet to get, by the iterator that gave them."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, Noted] = weakref.WeakKeyDictionary()
        """Iterator that is asked ahead of the loop -> notes on the batch that the loop gets next."""
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()
        """Iterators of which it is known whether they are asked ahead."""
        self._latest: weakref.ref[object] | None = None
        """The iterator that gave the last batch, if it is not asked ahead. Looking it up in sets of weak references at
        each batch would cost more than the rest."""

    def swap_notes(self, source: object, noted: Noted) -> Noted:
        """Store the notes on a batch that `source` gave; return those on the batch that the loop gets."""
        if self._latest is not None and self._latest() is source:
            return noted
        if source not in self._asked:
            self._asked.add(source)
            if _is_ahead(sys._getframe(1)):
                self._waiting[source] = None
        if source not in self._waiting:
            self._latest = weakref.ref(source)
            return noted
        before, self._waiting[source] = self._waiting[source], noted
        return before

    def last(self, source: object) -> Noted:
        """Return the notes on the loop's last batch after `source` has ended; None where the loop has it already."""
        return self._waiting.get(source)


def _is_ahead(frame: FrameType | None) -> bool:
    for _ in range(FRAMES):
        if frame is None:
            return False
        module = frame.f_globals.get("__name__")
        if module == _ACCELERATE:
            return True
        if module in _FETCHERS:
            fetcher = frame.f_locals.get("self")
            return getattr(fetcher, "length", 0) is None and getattr(fetcher, "prefetch_batches", 0) == 1
        frame = frame.f_back
    return False


class Batches:
    """The training loader of a run: the one given as `attach(loader=)`, or whatever goes through `monitor.batches`."""

    def __init__(self, accumulator: StepAccumulator, loader: Any = None) -> None:
        self._accumulator = accumulator
        self._sampler = loader._index_sampler if isinstance(loader, DataLoader) else None
        self._known = loader is not None
        self._to_skip = 0
        self._outer = 0
        self._contents: BatchFingerprints | None = BatchFingerprints()
        """None once examining a batch failed."""
        self._ahead = FetchAhead()
        self.facts: dict[str, Any] = {}
        """Facts about the loaders, found from their batches, for the hello message."""
        self.announce: Callable[[], None] = lambda: None
        """Called when `facts` has changed."""

    def skip(self, count: int) -> str:
        """Discard the next `count` batches. If the epoch ends before, the rest is left for the next one. Returns the
        reason if none can be skipped, else an empty text."""
        if count and not self._known:
            return "no batch is skipped: pass attach(loader=...), or iterate over monitor.batches(loader)"
        self._to_skip += max(count, 0)
        return ""

    def watch(self, loader: Iterable[Batch]) -> _Watched[Batch]:
        """Return `loader` so wrapped that the wait for each batch is measured."""
        self._known = True
        return _Watched(self, loader)

    # Called by the patched DataLoader.

    def batch_fetched(self, iterator: object, seconds: float, batch: object) -> None:
        """Record that a DataLoader's iterator gave a batch. Inside `watch` that is measured already."""
        if not self._outer:
            self._accumulator.batch_fetched(iterator, seconds, self._describe(batch, iterator))

    def _describe(self, batch: object, source: object) -> dict[str, float] | None:
        try:
            if self._contents is None or not self._accumulator.is_training_thread():
                return None
            looked_at = self._ahead.swap_notes(source, self._contents.describe_batch(batch, source))
            if self.facts != self._contents.facts:
                self.facts = dict(self._contents.facts)
                self.announce()
            if self._accumulator.unseen.pausing:
                self._accumulator.unseen.restore(_IDENTITY)
            return looked_at
        except Exception:
            if self._accumulator.unseen.record_failure(_IDENTITY, "batches", "without the identity of batches"):
                self._contents = None
            return None

    def loader_exhausted(self, iterator: object) -> None:
        """Record that a DataLoader's iterator has no more batches. Inside `watch` the wrapper records it."""
        if self._contents is not None and self._accumulator.is_training_thread():
            self._contents.begin_anew()
        if not self._outer:
            self._accumulator.loader_exhausted(iterator)
            if (noted := self._ahead.last(iterator)) is not None and self._accumulator.is_training_thread():
                self._accumulator.totals.batch = noted

    def to_skip(self, iterator: object) -> bool:
        """Whether the next batch of a DataLoader's iterator must be discarded."""
        if self._outer:
            return False
        self._accumulator.request_batch(iterator)
        if not self._to_skip:
            return False
        return self._sampler is not None and getattr(iterator, "_index_sampler", None) is self._sampler

    def record_skip(self) -> None:
        """Count a batch that was discarded. Not called at the end of an epoch, where there is none."""
        self._to_skip -= 1

    def pull(self, iterator: Iterator[Batch], source: object) -> Batch:
        """Return the next batch that is not skipped; `source` is what pulls it. Raises StopIteration at the end."""
        begin = time.perf_counter()
        self._accumulator.request_batch(source, trains=True)
        self._outer += 1
        try:
            while self._to_skip:
                next(iterator)
                self.record_skip()
            batch = next(iterator)
        except StopIteration:
            with self._accumulator.unseen.swallow_faults("ends of the loader", "they are not seen"):
                self._accumulator.loader_exhausted(source)
            raise
        finally:
            self._outer -= 1
        with self._accumulator.unseen.swallow_faults("waits for data", "they are not seen"):
            self._accumulator.batch_fetched(source, time.perf_counter() - begin, self._describe(batch, source))
        return batch


class _Watched(Generic[Batch]):
    """An iterable like the loader it wraps: it can be iterated as often, is as long, and has its attributes."""

    def __init__(self, batches: Batches, loader: Iterable[Batch]) -> None:
        self._batches, self._loader = batches, loader

    def __iter__(self) -> Iterator[Batch]:
        return _Pull(self._batches, iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle as the loader itself: a copy belongs to no run."""
        return copy.copy, (self._loader,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


class _Pull(Generic[Batch]):
    def __init__(self, batches: Batches, iterator: Iterator[Batch]) -> None:
        self._batches, self._iterator = batches, iterator

    def __iter__(self) -> _Pull[Batch]:
        return self

    @property
    def _index_sampler(self) -> Any:
        """The index sampler of the DataLoader's iterator inside."""
        return getattr(self._iterator, "_index_sampler", None)

    def __next__(self) -> Batch:
        return self._batches.pull(self._iterator, self)


LEAVES = 8
"""Most tensors of a batch that are examined."""
DEPTH = 4
ELEMENTS = 64
REMEMBERED = 64
SPACING_SECONDS = 0.05
"""Batches this far apart are all examined; of closer ones at most one per interval, except in bursts."""
SHARE = 0.001
"""Largest share of a fast loop's time spent on examining batches, except in bursts. It takes 10 to 20 us a tensor, and
ten times as long in a fast loop, which drives this code out of the processor's caches."""
BURST, BURST_EVERY = 16, 1024
"""Batches in a burst, each of which is examined to find repeats among neighbours, and from one burst to the next."""

LISTED = 8
"""Most generators that are named."""


class BatchFingerprints:
    """Examines batches as they come."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._source: weakref.ref[object] | None = None
        self.facts: dict[str, Any] = {}
        """Names of generators that workers have copies of, and the largest number of workers, of all iterators so far.
        They only grow: otherwise, loaders that take turns would cause a new hello message at each epoch."""
        self._copied: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Iterator -> number of copied generators, as found at its first batch that was examined."""
        self._count = 0
        self._again_at = self._came_at = 0.0
        self._spacing = SPACING_SECONDS

    def begin_anew(self) -> None:
        """Forget the epoch's batches, as it is over: the next may well have the same ones."""
        self._seen.clear()

    def describe_batch(self, batch: object, source: object) -> dict[str, float] | None:
        """Return the signals of a batch, or None where this one is not examined. `source` is the iterator that gave it;
        a new one begins a new epoch, since an epoch that is broken off never reaches its end."""
        if self._source is None or self._source() is not source:
            self._source = weakref.ref(source)
            self.begin_anew()
        now, number, before = time.perf_counter(), self._count, self._came_at
        self._count += 1
        self._came_at = now
        if now - before < self._spacing and now < self._again_at and number % BURST_EVERY >= BURST:
            return None
        found = self._look(batch)
        if found is not None and (copied := self._count_copied(source)):
            found["copied_generators"] = float(copied)
        self._again_at = now + max(self._spacing, (time.perf_counter() - now) / SHARE)
        return found

    def _count_copied(self, source: object) -> int:
        if source not in self._copied:
            iterator = source._iterator if isinstance(source, _Pull) else source
            names = list_copied_generators(iterator)
            self._copied[source] = len(names)
            if names:
                known = [*self.facts.get("copied_generators", ()), *map(printable, names)]
                workers = max(self.facts.get("copying_workers", 0), count_workers(iterator))
                self.facts = {"copied_generators": [*dict.fromkeys(known)][:LISTED], "copying_workers": workers}
        return self._copied[source]

    def _look(self, batch: object) -> dict[str, float] | None:
        tensors = [tensor for tensor in _tensors(batch, DEPTH) if not tensor.is_nested][:LEAVES]
        if not tensors:
            return None
        shape = tensors[0].shape
        found = {"batch_elements": float(sum(tensor.numel() for tensor in tensors))}
        if shape:
            found["batch_size"] = float(shape[0])
        if len(shape) > 1:
            found["batch_length"] = float(shape[1])
        identity = identity_of(tensors)
        if identity is not None:
            found["batch_identity"] = float(identity)
            found["batch_repeated"] = float(identity in self._seen)
            self._seen.append(identity)
        return found


def identity_of(tensors: list[torch.Tensor]) -> int | None:
    """Return a hash of 48 bits, or None if a tensor is not plain host memory."""
    hashed = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        if (
            tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or is_wrapper_tensor(tensor)
            or not dense(tensor)
        ):
            return None
        hashed.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        if tensor.numel():
            hashed.update(_read_sample(tensor))
    return int.from_bytes(hashed.digest(), "big")


_WORDS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Bytes of a word -> its code in `array`. An element of 16 bytes is two words."""
_SIZES = 64
"""Most sizes of tensors whose places are remembered: sequences are of many lengths."""


def _read_sample(tensor: torch.Tensor) -> bytes:
    """Return up to `ELEMENTS` words of a dense tensor in host memory, by Python's own means: torch's take twice as
    long."""
    word = min(tensor.element_size(), max(_WORDS))
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= ELEMENTS * word:
        return ctypes.string_at(tensor.data_ptr(), nbytes)
    memory, read_places = _choose_places(nbytes, word)
    words = memoryview(memory.from_address(tensor.data_ptr())).cast("B").cast(_WORDS[word])
    return array(_WORDS[word], read_places(words)).tobytes()


@functools.lru_cache(maxsize=_SIZES)
def _choose_places(nbytes: int, word: int) -> tuple[Any, itemgetter[Any]]:
    """Return the type of the memory, and what reads one place in each of `ELEMENTS` stretches of it. The places are
    drawn, the same ones every time: at even distances all may be of one column, which batches have in common, such as
    the first token of each sequence or a corner of each picture."""
    draw = random.Random(0).random
    stretch = nbytes // word / ELEMENTS
    return ctypes.c_char * nbytes, itemgetter(*(int((part + draw()) * stretch) for part in range(ELEMENTS)))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, in the order in which the batch holds them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and (held := find_dict(value)) is not None:
        for one in dict.values(held):
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in itertools.islice(read_sequence(value), LEAVES):
            yield from _tensors(one, depth - 1)
