"""Statistics of tensors on CUDA in one read of each, by Triton: a launch for each type, and one.

Not the default: it has run in Triton's interpreter alone, never on a GPU yet. SENTINEL_TRITON=1 turns it on; it is
compiled at the first step that is sampled, for some seconds.

    read    one program for each CHUNK of elements; leaves a column of sums. Tensors whose addresses are no multiples of
            16 bytes, as views into a larger buffer may be, have a launch of their own
    gather  one program for each tensor: of its columns, what goes to the host

A tensor of another type than float32, float16 and bfloat16, or with gaps in its memory, is copied first. Nothing waits
for the device: addresses are written to pinned memory, and only when they have changed.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from sentinel.hooks.measure.statistics import HIGH, LOW, NONFINITE, NORM, SMALLEST, ZEROS, combine_norms
from sentinel.hooks.torch_interop.tensors import Scalar

CHUNK = 8192
"""Elements of one program."""
WARPS = 4
"""That it has."""
STEP = 1024
"""Columns that `gather` takes at a time: the largest tensor's decide how long it takes."""
_SUMS = 6
"""Squares, minimum, maximum, non-finite, smallest magnitude over 0, zeros."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_VECTOR = 16
"""Bytes of the widest load. Where the addresses are multiples of it, and no element is masked, the compiler uses it."""


@triton.jit
def _value(address, places, there, KIND: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """As float32. bfloat16 is its upper half."""
    if KIND == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == 1:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    found = tl.load(pointer + places) if WHOLE else tl.load(pointer + places, mask=there, other=0)
    return (found.to(tl.int32) << 16).to(tl.float32, bitcast=True) if KIND == 2 else found.to(tl.float32)


@triton.jit(do_not_specialize=["begin", "width"])
def _read(
    addresses, counts, slot_of, first_of, sums, begin, width,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    column = begin + tl.program_id(0)
    slot = tl.load(slot_of + column)
    start = (column - tl.load(first_of + slot)).to(tl.int64) * CHUNK
    inside = tl.arange(0, CHUNK)
    left = tl.minimum(tl.load(counts + slot) - start, CHUNK).to(tl.int32)
    address = tl.load(addresses + slot)
    # NaN is left out of minimum and maximum here; where there is one, the squares tell.
    if left == CHUNK:
        value = _value(address, start + inside, inside < left, KIND, ALIGNED, True)
        low, high = tl.min(value), tl.max(value)
    else:
        there = inside < left
        value = _value(address, start + inside, there, KIND, ALIGNED, False)
        low = tl.min(tl.where(there, value, float("inf")))
        high = tl.max(tl.where(there, value, float("-inf")))
    size = tl.abs(value)
    squares = tl.sum(value * value)
    small = tl.min(tl.where(size > 0, size, float("inf")))
    nothing = left.to(tl.float32) - tl.sum((size > 0).to(tl.float32))
    broken = 0.0
    if (squares < float("inf")) == 0:  # rare, so that elements are usually read only once
        broken = tl.sum(((size < float("inf")) == 0).to(tl.float32))  # what is masked is 0
        nothing = nothing - tl.sum((value != value).to(tl.float32))
    tl.store(sums + column, squares)
    tl.store(sums + width + column, low)
    tl.store(sums + 2 * width + column, high)
    tl.store(sums + 3 * width + column, broken)
    tl.store(sums + 4 * width + column, small)
    tl.store(sums + 5 * width + column, nothing)


@triton.jit(do_not_specialize=["width", "tensors"])
def _gather(sums, first_of, place_of, scale, out, width, tensors, STEP: tl.constexpr):
    slot = tl.program_id(0)
    begin, end = tl.load(first_of + slot), tl.load(first_of + slot + 1)
    infinity = float("inf")
    squares = tl.zeros([STEP], tl.float64)
    low = tl.full([STEP], float("inf"), tl.float32)
    high = tl.full([STEP], float("-inf"), tl.float32)
    small = tl.full([STEP], float("inf"), tl.float32)
    nonfinite = tl.zeros([STEP], tl.float32)
    zeros = tl.zeros([STEP], tl.float32)
    for at in range(begin, end, STEP):
        columns = at + tl.arange(0, STEP)
        there = columns < end
        squares += tl.load(sums + columns, mask=there, other=0.0).to(tl.float64)
        low = tl.minimum(low, tl.load(sums + width + columns, mask=there, other=float("inf")))
        high = tl.maximum(high, tl.load(sums + 2 * width + columns, mask=there, other=float("-inf")))
        nonfinite += tl.load(sums + 3 * width + columns, mask=there, other=0.0)
        small = tl.minimum(small, tl.load(sums + 4 * width + columns, mask=there, other=float("inf")))
        zeros += tl.load(sums + 5 * width + columns, mask=there, other=0.0)
    by = tl.load(scale)
    total = tl.sum(squares)
    broken = total != total  # squares and their sums are NaN where an element is, and nowhere else
    least = tl.min(small)
    to = out + tl.load(place_of + slot)
    tl.store(to, tl.div_rn(tl.sqrt(total).to(tl.float32), by))
    tl.store(to + tensors, tl.where(broken, float("nan"), tl.div_rn(tl.min(low), by)))
    tl.store(to + 2 * tensors, tl.where(broken, float("nan"), tl.div_rn(tl.max(high), by)))
    tl.store(to + 3 * tensors, tl.sum(nonfinite))
    tl.store(to + 4 * tensors, tl.where(least < infinity, tl.div_rn(least, by), 0.0))
    tl.store(to + 5 * tensors, tl.sum(zeros))


class TritonStatistics:
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
        return combine_norms(self._table[NORM])

    def column(self, statistic: int) -> torch.Tensor:
        """See Statistics."""
        return self._table[statistic]

    norms = property(lambda self: self._table[NORM])
    extremes = property(lambda self: (self._table[LOW], self._table[HIGH]))
    nonfinite = property(lambda self: self._table[NONFINITE])
    smallest = property(lambda self: self._table[SMALLEST])
    zeros = property(lambda self: self._table[ZEROS])


class LaunchPlan:
    """Which program reads what, for tensors of these sizes and types: made once for a model."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device
        self.order = sorted(range(len(tensors)), key=lambda place: (*_likeness(tensors[place]), place))
        """Place of the tensor in each slot: tensors that one launch can read are neighbours."""
        counts = [tensors[place].numel() for place in self.order]
        chunks = [-(-count // CHUNK) for count in counts]
        first = [0, *itertools.accumulate(chunks)]
        self.width = first[-1]
        owner = [slot for slot, number in enumerate(chunks) for _ in range(number)]
        self.counts, self.slot_of, self.first_of, self.place_of = (
            _send_numbers(numbers, kind, device)
            for numbers, kind in (
                (counts, torch.int64), (owner or [0], torch.int32), (first, torch.int32), (self.order, torch.int32)
            )
        )  # fmt: skip
        self.launches: list[tuple[int, bool, int, int]] = []
        """(kind, whether addresses are aligned, first program, number of programs)."""
        for (kind, odd), slots in itertools.groupby(
            range(len(counts)), lambda slot: _likeness(tensors[self.order[slot]])
        ):
            own = list(slots)
            begin, number = first[own[0]], first[own[-1] + 1] - first[own[0]]
            if number:
                self.launches.append((kind, not odd, begin, number))
        self.one = torch.ones((), device=device)
        self._addresses: list[int] = []
        self._sent = torch.empty(0)

    def addresses(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """By slot, on the device; sent again where one has changed."""
        found = [tensors[place].data_ptr() for place in self.order]
        if found != self._addresses:
            self._addresses, self._sent = found, _send_numbers(found, torch.int64, tensors[0].device)
        return self._sent


_plans: dict[tuple[Any, ...], LaunchPlan] = {}
_PLANS = 16
"""At most: a model whose gradients come and go must not let them pile up."""


def measure_tensors(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> TritonStatistics:
    """The statistics of `tensors`, which are on one device, on their way."""
    tensors = [_readable(tensor) for tensor in tensors]
    key = (tensors[0].device, *((tensor.numel(), *_likeness(tensor)) for tensor in tensors))
    if key not in _plans:
        if len(_plans) >= _PLANS:
            _plans.clear()
        _plans[key] = LaunchPlan(tensors)
    plan, device = _plans[key], tensors[0].device
    addresses = plan.addresses(tensors)
    sums = torch.empty(_SUMS * max(plan.width, 1), device=device)
    out = torch.empty(6, len(tensors), device=device)
    by = plan.one if scale is None else scale.to(device, torch.float32, non_blocking=True)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for kind, aligned, begin, number in plan.launches:
            given = (addresses, plan.counts, plan.slot_of, plan.first_of, sums, begin, plan.width)
            _read[(number,)](*given, KIND=kind, ALIGNED=aligned, CHUNK=CHUNK, num_warps=WARPS)
        given = (sums, plan.first_of, plan.place_of, by, out, plan.width, len(tensors))
        _gather[(len(tensors),)](*given, STEP=STEP)
    return TritonStatistics(out)


def _likeness(tensor: torch.Tensor) -> tuple[int, bool]:
    """What one launch has in common: (kind, whether the address is no multiple of the widest load)."""
    return _KINDS[tensor.dtype], tensor.data_ptr() % _VECTOR != 0


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.dtype not in _KINDS:
        tensor = tensor.to(torch.float32)
    gapless = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor if gapless else tensor.contiguous()


def _send_numbers(numbers: list[int], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, on the device once it comes to them."""
    host = torch.tensor(numbers, dtype=kind, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
