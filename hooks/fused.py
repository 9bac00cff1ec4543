"""Statistics of tensors on CUDA in one read of each, by Triton: two launches for any number of tensors of one type.

Not the default: it has run in Triton's interpreter alone, never on a GPU yet. SENTINEL_TRITON=1 turns it on; it is
compiled at the first step that is sampled, for some seconds.

    read    one program for each CHUNK of elements; leaves a column of sums
    gather  one program for each tensor: of its columns, what goes to the host

A tensor of another type than float32, float16 and bfloat16, or with gaps in its memory, is copied first. Nothing waits
for the device: addresses are written to pinned memory, and only when they have changed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sentinel.hooks.statistics import HIGH, LOW, NONFINITE, NORM, SMALLEST, ZEROS, over
from sentinel.hooks.tally import Scalar

CHUNK = 8192
"""Elements of one program."""
_SUMS = 7
"""Squares, minimum, maximum, non-finite, smallest magnitude over 0, zeros, NaN."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@triton.jit
def _read(addresses, counts, tensor_of, first_of, sums, begin, width, KIND: tl.constexpr, CHUNK: tl.constexpr):
    column = begin + tl.program_id(0)
    tensor = tl.load(tensor_of + column)
    chunk = (column - tl.load(first_of + tensor)).to(tl.int64)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    there = places < tl.load(counts + tensor)
    address = tl.load(addresses + tensor)
    if KIND == 0:
        value = tl.load(address.to(tl.pointer_type(tl.float32)) + places, mask=there, other=0.0)
    elif KIND == 1:
        value = tl.load(address.to(tl.pointer_type(tl.float16)) + places, mask=there, other=0.0).to(tl.float32)
    else:  # bfloat16 is the upper half of float32
        bits = tl.load(address.to(tl.pointer_type(tl.int16)) + places, mask=there, other=0)
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    infinity = float("inf")
    size = tl.abs(value)
    nan = value != value
    finite = size < infinity
    tl.store(sums + column, tl.sum(value * value))
    tl.store(sums + width + column, tl.min(tl.where(there & (value == value), value, infinity)))
    tl.store(sums + 2 * width + column, tl.max(tl.where(there & (value == value), value, -infinity)))
    tl.store(sums + 3 * width + column, tl.sum(tl.where(there & (finite == 0), 1.0, 0.0)))
    tl.store(sums + 4 * width + column, tl.min(tl.where(there & finite & (size > 0), size, infinity)))
    tl.store(sums + 5 * width + column, tl.sum(tl.where(there & (value == 0), 1.0, 0.0)))
    tl.store(sums + 6 * width + column, tl.sum(tl.where(there & nan, 1.0, 0.0)))


@triton.jit
def _gather(sums, first_of, scale, out, width, tensors, STEP: tl.constexpr):
    tensor = tl.program_id(0)
    begin, end = tl.load(first_of + tensor), tl.load(first_of + tensor + 1)
    infinity = float("inf")
    squares = tl.zeros([STEP], tl.float64)
    low = tl.full([STEP], float("inf"), tl.float32)
    high = tl.full([STEP], float("-inf"), tl.float32)
    small = tl.full([STEP], float("inf"), tl.float32)
    nonfinite = tl.zeros([STEP], tl.float32)
    zeros = tl.zeros([STEP], tl.float32)
    nan = tl.zeros([STEP], tl.float32)
    for at in range(begin, end, STEP):
        columns = at + tl.arange(0, STEP)
        there = columns < end
        squares += tl.load(sums + columns, mask=there, other=0.0).to(tl.float64)
        low = tl.minimum(low, tl.load(sums + width + columns, mask=there, other=float("inf")))
        high = tl.maximum(high, tl.load(sums + 2 * width + columns, mask=there, other=float("-inf")))
        nonfinite += tl.load(sums + 3 * width + columns, mask=there, other=0.0)
        small = tl.minimum(small, tl.load(sums + 4 * width + columns, mask=there, other=float("inf")))
        zeros += tl.load(sums + 5 * width + columns, mask=there, other=0.0)
        nan += tl.load(sums + 6 * width + columns, mask=there, other=0.0)
    by = tl.load(scale)
    broken = tl.sum(nan) > 0
    least = tl.min(small)
    tl.store(out + tensor, tl.sqrt(tl.sum(squares)).to(tl.float32) / by)
    tl.store(out + tensors + tensor, tl.where(broken, float("nan"), tl.min(low) / by))
    tl.store(out + 2 * tensors + tensor, tl.where(broken, float("nan"), tl.max(high) / by))
    tl.store(out + 3 * tensors + tensor, tl.sum(nonfinite))
    tl.store(out + 4 * tensors + tensor, tl.where(least < infinity, least / by, 0.0))
    tl.store(out + 5 * tensors + tensor, tl.sum(zeros))


class Fused:
    """Statistics that are on their way: a table on the device, (6, tensors) float32. Of an empty tensor: norm and
    counts 0, minimum +inf, maximum -inf."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    @property
    def on_host(self) -> bool:
        """See Statistics."""
        return self._table.device.type == "cpu"

    @property
    def total(self) -> Scalar:
        """See Statistics."""
        return over(self._table[NORM])

    def column(self, statistic: int) -> torch.Tensor:
        """See Statistics."""
        return self._table[statistic]

    norms = property(lambda self: self._table[NORM])
    extremes = property(lambda self: (self._table[LOW], self._table[HIGH]))
    nonfinite = property(lambda self: self._table[NONFINITE])
    smallest = property(lambda self: self._table[SMALLEST])
    zeros = property(lambda self: self._table[ZEROS])


class Plan:
    """Which program reads what, for tensors of these sizes and types: made once for a model."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device
        self.counts = [tensor.numel() for tensor in tensors]
        chunks = [-(-count // CHUNK) for count in self.counts]
        first = [0]
        for number in chunks:
            first.append(first[-1] + number)
        self.width = first[-1]
        owner = [place for place, number in enumerate(chunks) for _ in range(number)]
        self.on_device = [
            _sent(numbers, kind, device)
            for numbers, kind in ((self.counts, torch.int64), (owner or [0], torch.int32), (first, torch.int32))
        ]
        self.launches: list[tuple[int, int, int]] = []
        """(kind, first program, number of programs): neighbours of one type together."""
        for place, tensor in enumerate(tensors):
            kind = _KINDS[tensor.dtype]
            if self.launches and self.launches[-1][0] == kind:
                _, begin, number = self.launches.pop()
                self.launches.append((kind, begin, number + chunks[place]))
            else:
                self.launches.append((kind, first[place], chunks[place]))
        self.one = torch.ones((), device=device)
        self._addresses: list[int] = []
        self._sent = torch.empty(0)

    def addresses(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """On the device; sent anew where one has changed."""
        found = [tensor.data_ptr() for tensor in tensors]
        if found != self._addresses:
            self._addresses, self._sent = found, _sent(found, torch.int64, tensors[0].device)
        return self._sent


_plans: dict[tuple[Any, ...], Plan] = {}
_PLANS = 16
"""At most: a model whose gradients come and go must not let them pile up."""


def measured(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> Fused:
    """The statistics of `tensors`, which are on one device, on their way."""
    tensors = [_readable(tensor) for tensor in tensors]
    key = (tensors[0].device, *((tensor.numel(), tensor.dtype) for tensor in tensors))
    if key not in _plans:
        if len(_plans) >= _PLANS:
            _plans.clear()
        _plans[key] = Plan(tensors)
    plan, device = _plans[key], tensors[0].device
    counts, tensor_of, first_of = plan.on_device
    addresses = plan.addresses(tensors)
    sums = torch.empty(_SUMS * max(plan.width, 1), device=device)
    out = torch.empty(6, len(tensors), device=device)
    for kind, begin, number in plan.launches:
        if number:
            _read[(number,)](addresses, counts, tensor_of, first_of, sums, begin, plan.width, KIND=kind, CHUNK=CHUNK)
    by = plan.one if scale is None else scale.to(device, torch.float32, non_blocking=True)
    _gather[(len(tensors),)](sums, first_of, by, out, plan.width, len(tensors), STEP=256)
    return Fused(out)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.dtype not in _KINDS:
        tensor = tensor.to(torch.float32)
    gapless = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor if gapless else tensor.contiguous()


def _sent(numbers: list[int], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, on the device once it comes to them."""
    host = torch.tensor(numbers, dtype=kind, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
