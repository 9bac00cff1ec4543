"""What a batch is, without its contents: a hash of a few of its elements, and its shape.

    identity   48 bits of a hash over up to 64 elements of each tensor, at even distances, with type and shape. The same
               batch has the same identity in every run; what was in it does not leave the process
    repeated   1 where one of the last `REMEMBERED` that were looked at in this epoch had the same: workers that draw
               the same numbers, or each give the whole of a stream

Tensors in host memory are read; of those on a device only the shape is, since reading one would wait for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sentinel.hooks.torch_interop.layer_table import is_wrapper_tensor
from sentinel.hooks.torch_interop.strided_sample import dense, spread

LEAVES = 8
"""Tensors of a batch that are looked at."""
DEPTH = 4
ELEMENTS = 64
REMEMBERED = 64
SPACING_SECONDS = 0.05
"""Batches that come so far apart are all looked at; of others one in so much time at most, but for bursts."""
SHARE = 0.001
"""Of a fast loop's time, at most, goes to looks, but for bursts. One takes 10 to 20 us a tensor, and ten times as long
in a fast loop, which has driven its code out of the processor's caches."""
BURST, BURST_EVERY = 16, 1024
"""Of so many batches, the first ones are looked at one after another: repeats among neighbours are to be seen."""


class BatchFingerprints:
    """Looks at batches as they come."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._source: weakref.ref[object] | None = None
        self._count = 0
        self._again_at = self._came_at = 0.0
        self._spacing = SPACING_SECONDS

    def begin_anew(self) -> None:
        """An epoch is over: the next may well have the same batches."""
        self._seen.clear()

    def describe_batch(self, batch: object, source: object) -> dict[str, float] | None:
        """Signals of a batch, or None where this one is not looked at. `source` is the iterator that gave it: that of
        an epoch that was broken off does not come to its end."""
        if self._source is None or self._source() is not source:
            self._source = weakref.ref(source)
            self.begin_anew()
        now, number, before = time.perf_counter(), self._count, self._came_at
        self._count += 1
        self._came_at = now
        if now - before < self._spacing and now < self._again_at and number % BURST_EVERY >= BURST:
            return None
        found = self._look(batch)
        self._again_at = now + max(self._spacing, (time.perf_counter() - now) / SHARE)
        return found

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
    """48 bits. None where a tensor is not in host memory, or not one that lies there plainly."""
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
            taken = spread(tensor, ELEMENTS).contiguous()
            hashed.update(ctypes.string_at(taken.data_ptr(), taken.numel() * taken.element_size()))
    return int.from_bytes(hashed.digest(), "big")


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """In the order in which the batch holds them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value[:LEAVES]:
            yield from _tensors(one, depth - 1)
