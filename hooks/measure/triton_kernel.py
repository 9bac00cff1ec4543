"""Statistics of tensors on CUDA in one read of each, by Triton: one launch per type of tensor, and one to gather.

    read    one program for each CHUNK of elements; writes a column of sums. Tensors whose addresses are not multiples
            of 16 bytes, as views into a larger buffer may be, have a launch of their own
    gather  one program for each tensor: combines its columns into the values that go to the host

Tensors of other types than float32, float16 and bfloat16, or with gaps in their memory, are left to torch (`can_read`).
Nothing waits for the device: addresses are written to pinned memory, and only when they have changed.
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

CHUNK = 65536
"""Elements per program."""
BLOCK = 2048
"""Elements that a program reads at a time: eight per thread, one load of 16 bytes for the narrow types."""
WARPS = 8
"""Warps per program. These three sizes are the fastest of those tried on an H200 (docs/performance.md)."""
STEP = 1024
"""Columns that `gather` processes at a time: the largest tensor's columns decide how long it takes."""
_SUMS = 6
"""Number of sums in a column: squares, minimum, maximum, non-finite, smallest magnitude over 0, zeros."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_VECTOR = 16
"""Bytes of the widest load. The compiler uses it where addresses are multiples of it and no element is masked."""


@triton.jit
def _value(address, places, there, KIND: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Load elements as float32. A bfloat16 is the upper half of its float32."""
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
    KIND: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = begin + tl.program_id(0)
    slot = tl.load(slot_of + column)
    start = (column - tl.load(first_of + slot)).to(tl.int64) * CHUNK
    inside = tl.arange(0, BLOCK)
    left = tl.minimum(tl.load(counts + slot) - start, CHUNK).to(tl.int32)
    address = tl.load(addresses + slot)
    infinity = float("inf")
    squares = tl.zeros([BLOCK], tl.float32)
    low = tl.full([BLOCK], infinity, tl.float32)
    high = tl.full([BLOCK], -infinity, tl.float32)
    small = tl.full([BLOCK], infinity, tl.float32)
    zeros = tl.zeros([BLOCK], tl.int32)
    # NaN does not reach minimum and maximum here; `_gather` finds it by the squares.
    if left == CHUNK:
        for at in range(0, CHUNK, BLOCK):
            value = _value(address, start + at + inside, inside < left, KIND, ALIGNED, True)
            size, nothing = tl.abs(value), value == 0
            squares += value * value
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            small = tl.minimum(small, tl.where(nothing, infinity, size))
            zeros += nothing.to(tl.int32)
    else:
        for at in range(0, left, BLOCK):
            there = at + inside < left
            value = _value(address, start + at + inside, there, KIND, ALIGNED, False)
            size, nothing = tl.abs(value), value == 0
            squares += value * value
            low = tl.minimum(low, tl.where(there, value, infinity))
            high = tl.maximum(high, tl.where(there, value, -infinity))
            small = tl.minimum(small, tl.where(nothing, infinity, size))
            zeros += (nothing & there).to(tl.int32)
    total, broken = tl.sum(squares), 0.0
    if (total < infinity) == 0:  # rare, so that elements are usually read only once
        for at in range(0, left, BLOCK):
            value = _value(
                address, start + at + inside, at + inside < left, KIND, ALIGNED, False
            )  # a masked element is 0
            broken += tl.sum(((tl.abs(value) < infinity) == 0).to(tl.float32))
    tl.store(sums + column, total)
    tl.store(sums + width + column, tl.min(low))
    tl.store(sums + 2 * width + column, tl.max(high))
    tl.store(sums + 3 * width + column, broken)
    tl.store(sums + 4 * width + column, tl.min(small))
    tl.store(sums + 5 * width + column, tl.sum(zeros).to(tl.float32))


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
    """Statistics under way: a table on the device, (6, tensors) float32. An empty tensor has norm and counts 0,
    minimum +inf, maximum -inf."""

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
    """Which program reads what, for tensors of these sizes and types; made once per model."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device
        self.order = sorted(range(len(tensors)), key=lambda place: (*_likeness(tensors[place]), place))
        """Slot -> place of its tensor: tensors that one launch can read are neighbours."""
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
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self._addresses: list[int] = []
        self._sent = torch.empty(0)

    def addresses(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the address per slot, on the device; sent again where one has changed."""
        found = [tensors[place].data_ptr() for place in self.order]
        if found != self._addresses:
            self._addresses, self._sent = found, _send_numbers(found, torch.int64, tensors[0].device)
        return self._sent


_plans: dict[tuple[Any, ...], LaunchPlan] = {}
_PLANS = 16
"""Most plans that are kept: a model whose gradients come and go must not make them pile up."""


def can_read(tensors: list[torch.Tensor]) -> bool:
    """Whether all are on one device, without gaps in memory, and of types that the kernel reads."""
    device = tensors[0].device
    return all(tensor.device == device and tensor.dtype in _KINDS and _is_gapless(tensor) for tensor in tensors)


def _is_gapless(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def measure_tensors(tensors: list[torch.Tensor], scale: torch.Tensor | None = None) -> TritonStatistics:
    """Return the statistics of `tensors`, which passed `can_read`, under way on the device."""
    tensors = [tensor.detach() for tensor in tensors]
    key = (tensors[0].device, *((tensor.numel(), *_likeness(tensor)) for tensor in tensors))
    if key not in _plans:
        if len(_plans) >= _PLANS:
            _plans.clear()
        _plans[key] = LaunchPlan(tensors)
    plan, device = _plans[key], tensors[0].device
    addresses = plan.addresses(tensors)
    sums = torch.empty(_SUMS * max(plan.width, 1), dtype=torch.float32, device=device)
    out = torch.empty(6, len(tensors), dtype=torch.float32, device=device)
    by = plan.one if scale is None else scale.to(device, torch.float32, non_blocking=True)
    with _select_device(device):
        for kind, aligned, begin, number in plan.launches:
            given = (addresses, plan.counts, plan.slot_of, plan.first_of, sums, begin, plan.width)
            _read[(number,)](*given, **_options(kind, aligned))
        given = (sums, plan.first_of, plan.place_of, by, out, plan.width, len(tensors))
        _gather[(len(tensors),)](*given, STEP=STEP, enable_fp_fusion=True)
    return TritonStatistics(out)


Variant = tuple[torch.device, int, bool]
"""A variant of `_read`: device, type, and whether addresses are not multiples of the widest load."""
_compiled: set[Variant] = set()


def list_uncompiled(tensors: list[torch.Tensor]) -> set[Variant]:
    """Return the variants to compile before `measure_tensors` can launch for these without taking seconds."""
    return {(tensor.device, *_likeness(tensor)) for tensor in tensors} - _compiled


def compile_variants(variants: set[Variant]) -> None:
    """Compile the variants, which takes some seconds, and launch nothing: a launch on another thread than the loop's
    could break a CUDA graph that the loop captures."""
    for device, kind, odd in variants:
        with _select_device(device):
            numbers = (torch.int64, torch.int64, torch.int32, torch.int32, torch.float32)
            _make_launcher(_read.warmup(*numbers, 0, 1, grid=(1,), **_options(kind, not odd)))
            counts = (torch.float32, torch.int32, torch.int32, torch.float32, torch.float32)
            _make_launcher(_gather.warmup(*counts, 1, 1, grid=(1,), STEP=STEP, enable_fp_fusion=True))
        _compiled.add((device, kind, odd))


def _make_launcher(kernel: Any) -> None:
    """Make the kernel's launcher, up to Triton 3.6 a C program, which else the first launch would compile. Triton's
    interpreter has none."""
    if kernel is not None:
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _select_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _options(kind: int, aligned: bool) -> dict[str, Any]:
    """Return compile options. Fused multiply-add is set explicitly, as Triton 3.9 prints a warning where it is not."""
    sizes = {"CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": WARPS}
    return {"KIND": kind, "ALIGNED": aligned, "enable_fp_fusion": True, **sizes}


def _likeness(tensor: torch.Tensor) -> tuple[int, bool]:
    """Return what the tensors of one launch share: (kind, whether the address is no multiple of the widest load)."""
    return _KINDS[tensor.dtype], tensor.data_ptr() % _VECTOR != 0


def _send_numbers(numbers: list[int], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor, on the device once it reaches this operation."""
    host = torch.tensor(numbers, dtype=kind, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
