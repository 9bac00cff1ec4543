"""Host memory for snapshots: whether there is enough, and the buffer of one, reused as long as the layout stays.

`Budget` compares what snapshots need with what the machine, or the job's cgroup, has left.

The loop may free memory while it is copied, as `resize_(0)` and a first `share_memory_()` do. memmove would read on,
and the process would die of SIGSEGV. The kernel, asked to copy from the process itself by process_vm_readv(2), stops
where no memory is mapped any more and says so. Memory that was freed and belongs to another tensor by then is copied
all the same: `WriteDetector` finds out whether tensors are where they were.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sentinel.errors import RollbackError
from sentinel.hooks.core import faults
from sentinel.hooks.core.host_memory import memory_left
from sentinel.hooks.snapshot.capture import Cell
from sentinel.hooks.torch_interop.internals import release_pinned_memory
from sentinel.hooks.torch_interop.layer_table import local
from sentinel.hooks.torch_interop.tensors import dense, has_nonfinite, is_lazy

SPARE = 0.2
"""Share of what is left that stays free: DataLoader workers, the page cache, a checkpoint being saved."""

_COPIES: dict[str, Callable[[dict[str, Any]], float]] = {
    "SGD": lambda group: bool(group.get("momentum")),
    "Adagrad": lambda group: 1,
    "ASGD": lambda group: 1,
    "Muon": lambda group: 1,
    "RMSprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
    "Adam": lambda group: 2 + bool(group.get("amsgrad")),
    "AdamW": lambda group: 2 + bool(group.get("amsgrad")),
    "Adafactor": lambda group: 0.1,
    "LBFGS": lambda group: 2 * group.get("history_size", 100) + 3,
}
"""How many times the size of its parameters an optimizer of torch.optim keeps (read in its `_init_group`).

Others are taken for an Adam in float32.
"""


class Budget:
    """Limits the snapshots to the memory left. The ring calls it with the bytes of one snapshot before they are
    allocated."""

    def __init__(self, keep: int, root: Path = Path("/")) -> None:
        self._keep, self._root = keep, root
        self._granted = 0

    def __call__(self, nbytes: int) -> None:
        """Raise RollbackError, with the figures and the fix, if `keep` snapshots of this size are too many."""
        if nbytes > self._granted:
            self._check(nbytes, nbytes - self._granted, 1)
            self._granted = nbytes

    def expect(self, nbytes: int, ranks: int = 1) -> None:
        """Check an estimate, before any of the node's `ranks` has taken its part.

        What is really allocated is compared with what is left then.
        """
        self._check(nbytes, nbytes, ranks)

    def _check(self, nbytes: int, more: int, ranks: int) -> None:
        left, where = memory_left(self._root)
        wanted = more * self._keep * ranks
        if wanted > left * (1 - SPARE):
            raise RollbackError(
                f"rollback: keep={self._keep} snapshots of {_readable(nbytes)}"
                + (f" for each of {ranks} ranks" if ranks > 1 else "")
                + f" need {_readable(wanted)} of host memory and {_readable(left)} is left ({where}), of which a fifth "
                f"stays free. Give the job {_readable(wanted / (1 - SPARE) - left)} more"
                + ("" if self._keep == 2 else ", or lower keep (and raise every, so that every * (keep - 1) >= margin)")
            )


def estimate_bytes(tensors: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer], extra: Any) -> int:
    """Estimate the bytes of one snapshot: parameters, buffers, optimizer state, and the tensors nested in `extra`.

    Optimizer state is estimated if there is none yet.
    """
    size = sum(map(_size, tensors)) + sum(map(_state_bytes, optimizers)) + sum(map(_size, _tensors(extra)))
    return round_up_pinned(size) if any(tensor.is_cuda for tensor in tensors) else size


def round_up_pinned(size: int) -> int:
    """Return the bytes that torch takes for pinned memory of this size: a power of two.

    See ATen/core/CachingHostAllocator.h.
    """
    return 1 << (size - 1).bit_length() if size else 0


def give_back() -> None:
    """Return unused pinned memory to the system: torch keeps it for the next allocation of that size.

    Waits for the GPUs; does not raise if one has failed.
    """
    with faults.swallow_faults("giving pinned memory back", "torch keeps it"):
        release_pinned_memory()


def _size(tensor: Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    if optimizer.state:
        return sum(map(_size, _tensors(dict(optimizer.state))))
    copies = _COPIES.get(type(optimizer).__name__)
    total = 0.0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                part = local(parameter)
                total += copies(group) * _size(part) if copies else 2 * 4 * part.numel()
    return int(total)


def _readable(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


_WORD = 8
_LINE = 64
"""Bytes of a cache line: slots begin at cache lines."""

SAMPLED = 1 << 18
"""Elements that a detector reads in all, however large the model."""


class HostBuffer:
    """One flat buffer of 64-bit words, with a slot for each cell.

    Slots of one dtype lie together, and what is between them is zero, so that a whole dtype is judged by one operation.
    """

    def __init__(self) -> None:
        self._words, self._pinned = _zeros(0), 0
        self._layout: list[tuple[object, ...]] = []
        self._views: list[Tensor] = []
        self._packed: list[bool] = []
        self._regions: dict[torch.dtype, tuple[int, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self._words.numel() * _WORD

    @staticmethod
    def count_needed_bytes(cells: Sequence[Cell]) -> int:
        """Return the bytes that the cells need."""
        return sum(_lines(cell.kept.numel() * cell.kept.element_size()) for cell in cells)

    @staticmethod
    def count_taken_bytes(cells: Sequence[Cell]) -> int:
        """Return the bytes that are allocated for them."""
        size = HostBuffer.count_needed_bytes(cells)
        return round_up_pinned(size) if _on_gpu(cells) else size

    def seat(self, cells: Sequence[Cell]) -> None:
        """Give each cell its slot; allocates if the layout has changed."""
        layout: list[tuple[object, ...]] = [
            (cell.kept.shape, cell.kept.stride(), cell.kept.dtype, cell.device) for cell in cells
        ]
        if layout != self._layout:
            self._allocate(cells)
            self._layout = layout
        for cell, view in zip(cells, self._views, strict=True):
            cell.kept = view

    def _allocate(self, cells: Sequence[Cell]) -> None:
        self._layout, self._views = [], []
        before, self._pinned = self._pinned, round_up_pinned(self.count_needed_bytes(cells)) if _on_gpu(cells) else 0
        self._words = _zeros(0)  # release the old buffer before the new one is made
        if before not in (0, self._pinned):
            give_back()
        self._words = _zeros(self.count_needed_bytes(cells) // _WORD, pinned=self._pinned > 0)
        self._regions, self._packed = {}, [False] * len(cells)
        views: dict[int, Tensor] = {}
        start = 0
        for index in sorted(range(len(cells)), key=lambda index: str(cells[index].kept.dtype)):
            like = cells[index].kept
            strides = _compute_packed_strides(like)
            self._packed[index] = strides == like.stride() and like.device.type == "cpu"
            stop = start + _lines(like.numel() * like.element_size()) // _WORD
            flat = self._words[start:stop].view(like.dtype)
            views[index] = flat.as_strided(like.shape, strides)
            self._regions[like.dtype] = (self._regions.get(like.dtype, (start, stop))[0], stop)
            start = stop
        self._views = [views[index] for index in range(len(cells))]

    def fill(self, cells: Sequence[Cell]) -> None:
        """Copy the sources into the slots.

        Host memory is copied by the kernel and not by `copy_`: it runs beside the loop, and a second team of OpenMP
        threads would compete with the loop's own for the cores (600 tensors of 1 MB on two busy cores: 0.05 s against
        4.7 s). Raises RollbackError if a tensor has lost its memory since it was noted, or loses it meanwhile.
        """
        for cell, packed in zip(cells, self._packed, strict=True):
            source = cell.source
            assert source is not None
            there = bool(source.data_ptr()) or not source.numel()  # else reading there would end the process
            if there and is_lazy(source):
                cell.kept.copy_(source)
            elif there and packed:
                size = source.numel() * source.element_size()
                there = copy_bytes(cell.kept.data_ptr(), source.data_ptr(), size)
            elif there and source.is_cpu:
                there = copy_strided(cell.kept, source)
            elif there:
                cell.kept.copy_(source, non_blocking=source.is_cuda)
            if not there:
                raise RollbackError(f"the memory of {cell.name} was taken away between two steps")

    def checksum(self) -> int:
        """Return the sum of all words, modulo 2^64: any flipped bit, and most overwrites, change it."""
        return int(self._words.sum())

    def nonfinite(self) -> bool:
        """Whether a NaN or an infinity is anywhere."""
        return any(has_nonfinite(self._words[a:b].view(dtype)) for dtype, (a, b) in self._regions.items())


def _on_gpu(cells: Sequence[Cell]) -> bool:
    return any(cell.device.type == "cuda" for cell in cells)


class WriteDetector:
    """Tells whether tensors have been written to, or moved to other memory, since it was made.

    `_version` counts the writes that autograd can see; it misses writes through `.data`, as an EMA swap does. So the
    bits of each tensor are summed up too, on its device; and a strided sample of them is compared, to find values that
    change places.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._sources = [cell.source for cell in cells if cell.source is not None and cell.source.numel()]
        self._versions = list(map(_version, self._sources))
        share = max(16, SAMPLED // max(1, len(self._sources)))
        self._groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for source in self._sources:
            self._groups.setdefault((source.dtype, source.device), []).append(_sample(source, share))
        self._samples, self._sums = self._read(), self._sum_up()

    def has_changed(self) -> bool:
        """Whether a tensor was written to or moved. Compares bytes: a NaN is equal to itself there."""
        if self._versions != list(map(_version, self._sources)):
            return True
        then, now = (*self._samples, *self._sums), (*self._read(), *self._sum_up())
        return not all(torch.equal(one, other) for one, other in zip(then, now, strict=True))

    def _read(self) -> list[Tensor]:
        groups = self._groups.values()
        return [torch.cat([sample.reshape(-1) for sample in samples]).view(torch.uint8) for samples in groups]

    def _sum_up(self) -> list[Tensor]:
        """Return, for each device, the sum of the bits of each tensor there."""
        sums: dict[torch.device, list[Tensor]] = {}
        for source in self._sources:
            if dense(source):  # a tensor with gaps is in the sample as a whole
                sums.setdefault(source.device, []).append(_bits(source).sum(dtype=torch.int64))
        return [torch.stack(one) for one in sums.values()]


def _bits(dense: Tensor) -> Tensor:
    """Return its elements, as integers."""
    flat = dense.resolve_conj().resolve_neg().as_strided((dense.numel(),), (1,))
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WHOLE[flat.element_size()])


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _zeros(words: int, *, pinned: bool = False) -> Tensor:
    """Return zeros in host memory, whatever `torch.set_default_device` says."""
    return torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=pinned)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return version and address: a tensor without memory cannot be sampled."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _sample(tensor: Tensor, share: int) -> Tensor:
    """Return a view of some elements; of all if they are few, or have gaps between them."""
    if tensor.numel() <= share or not dense(tensor):
        return tensor
    # An odd step, so as not to walk down one column of a matrix whose width is a power of two.
    step = (tensor.numel() // share) | 1
    return tensor.as_strided((-(-tensor.numel() // step),), (step,))


def _compute_packed_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of the tensor: its own if it is dense."""
    return torch.empty_like(tensor, device="meta").stride()


def _lines(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


class _Stretch(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LONGEST = 1 << 30
"""Most bytes of one call: the kernel takes at most 2 GiB less a page."""
_PIECE = 1 << 24
"""Most bytes from the first to the last element that are copied in one go if there are gaps."""
_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None) if os.name == "posix" else None
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = (ctypes.c_int, *(ctypes.POINTER(_Stretch), ctypes.c_ulong) * 2, ctypes.c_ulong)


def copy_bytes(to: int, source: int, nbytes: int) -> bool:
    """Copy `nbytes` bytes from address `source` to address `to`, without the GIL. Returns whether all were there.

    If this call does not exist, or is forbidden (seccomp), memmove copies, and trusts that they are.
    """
    start = 0
    while start < nbytes:
        done = _copy_piece(to + start, source + start, min(nbytes - start, _LONGEST))
        if done < 0:
            if ctypes.get_errno() == errno.EFAULT:
                return False
            ctypes.memmove(to + start, source + start, nbytes - start)
            return True
        start += done
    return True


def copy_strided(into: Tensor, source: Tensor) -> bool:
    """Copy a tensor in host memory with gaps between its elements, as `copy_bytes` does.

    The gaps are copied along and dropped here. This takes up to some 16 MB more meanwhile.
    """
    if not source.numel():
        return True
    span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    nbytes = span * source.element_size()
    if nbytes > _PIECE:
        widest = max(range(source.dim()), key=lambda dim: (source.shape[dim] - 1) * source.stride(dim))
        halves = (tensor.tensor_split(2, widest) for tensor in (into, source))
        return all(copy_strided(*half) for half in zip(*halves, strict=True))
    words = torch.empty(span, dtype=source.dtype, device="cpu")
    if not copy_bytes(words.data_ptr(), source.data_ptr(), nbytes):
        return False
    into.copy_(words.as_strided(source.shape, source.stride()))
    return True


def _copy_piece(to: int, source: int, length: int) -> int:
    """Return the number of bytes copied; -1, with errno set, if there were none."""
    if _read is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    ours, theirs = _Stretch(to, length), _Stretch(source, length)
    return int(_read(os.getpid(), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
