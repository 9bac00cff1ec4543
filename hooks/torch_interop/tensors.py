"""Reads tensors for the hooks: their device, their bytes, whether a graph is being captured, and samples of elements.

A `Sample` holds a few elements of many tensors as one matrix, which tier 3 examines instead of all elements. A row
holds a tensor's elements in the order in which they lie in memory, so that a parameter and its gradient give the same
places. A tensor no longer than a row is included as a whole, and its statistics are exact; those of a longer one are
estimates: of 1,000 elements a share is off by 1.6 percentage points (one standard error) at most, a norm by 2 % where
they are Gaussian. Places are fixed: ranks that hold the same parameters sample the same elements.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
"""Whether a stream that captures graphs can exist: with ROCm, too."""


def pack_float32(column: torch.Tensor) -> bytes:
    """Return the float32 bytes of a tensor in host memory. Without numpy, which the training side does not need."""
    column = column.detach().to(torch.float32).contiguous()
    return ctypes.string_at(column.data_ptr(), column.numel() * 4) if column.numel() else b""


def is_capturing() -> bool:
    """Whether the current CUDA stream captures a graph: whatever is launched now would be part of every replay."""
    if not CUDA:
        return False
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


Scalar = float | torch.Tensor
"""A number, or a 0-dim tensor on a device, which is read later: reading it now would wait for the device."""


def scalar(tensor: torch.Tensor) -> Scalar:
    """Return a one-element tensor's value: a number on the CPU, on a device a copy that no later operation changes."""
    if tensor.is_cpu:  # not its device's name, which takes as long as the value
        return float(tensor.item())
    return tensor.detach().reshape(()).to(torch.float32, copy=True)


def to_scalar(value: object) -> Scalar | None:
    """Return a number or a one-element tensor as a scalar; None for anything else."""
    if isinstance(value, torch.Tensor):
        return scalar(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def on_one_device(values: Sequence[Scalar]) -> Sequence[Scalar]:
    """Return the values on one device, for arithmetic: tensors of two devices cannot be added. (A model over several
    devices has its loss, and with it GradScaler's scale, on the last.)"""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return values
    device = meeting_place(tensors)
    return [value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for value in values]


def sum_of(one: Scalar, other: Scalar) -> Scalar:
    """Return the sum of two scalars, whatever devices they are on."""
    if type(one) is float is type(other):
        return one + other
    one, other = on_one_device((one, other))
    return one + other


def is_finite(value: Scalar | None) -> bool:
    """False only if the value is known to be NaN or infinite. A value still on a device is not known."""
    return not isinstance(value, float) or math.isfinite(value)


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, equal for all views; a negative id for a sparse tensor or a wrapper."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return -id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's memory, which may exceed its elements; without memory, those of its elements."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory: it cannot be written to, so its content never changes."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def is_lazy(tensor: Tensor) -> bool:
    """Whether its elements are the conjugates or the negatives of what its memory holds, as those of `x.mH` are."""
    return tensor.is_conj() or tensor.is_neg()


def read_bits(tensor: Tensor) -> Tensor:
    """Return the bytes of its elements: a NaN is equal to itself there."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def has_nonfinite(tensor: Tensor) -> bool:
    """Whether the tensor has a NaN or an infinity. aminmax keeps both, and is 13 times as fast as isfinite here."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # aminmax does not support float8
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return not bool(torch.isfinite(low) & torch.isfinite(high))


BUDGET = 1 << 16
"""Most elements of a sample. A step takes three (weights before and after, gradients), under 256 k together."""


class Sample:
    """Elements of many tensors as one matrix, a row for each tensor. `each`: length of a row."""

    def __init__(self, tensors: Sequence[torch.Tensor], each: int, turn: int = 0) -> None:
        """None of `tensors` may be empty. If some are on a device, the sample is on it. Each `turn` samples other
        elements of the tensors that are longer than a row."""
        device = meeting_place(tensors)
        rows = [spread(tensor, each, turn) for tensor in tensors]
        counts = [row.numel() for row in rows]
        self.values = torch.zeros(len(tensors), each, dtype=torch.float32, device=device)
        """(tensors, each) float32; unused places are 0."""
        into = [row if n == each else row.narrow(0, 0, n) for row, n in zip(self.values.unbind(), counts, strict=True)]
        torch._foreach_copy_(into, rows, non_blocking=True)
        self.counts = send_numbers(counts, torch.int64, device)
        """(tensors,) int64: number of elements sampled."""
        self.size = sum(tensor.numel() for tensor in tensors)
        """Number of elements of all tensors."""
        standing = [tensor.numel() / n for tensor, n in zip(tensors, counts, strict=True)]
        self.weights = send_numbers(standing, torch.float32, device)
        """(tensors,) float32: number of elements that each sampled one represents."""

    def norms(self) -> torch.Tensor:
        """Return (tensors,) float32: estimated L2 norms."""
        return (self.values.square().sum(1) * self.weights).sqrt_()

    def zeros(self) -> torch.Tensor:
        """Return (tensors,) int64: number of sampled elements that are 0."""
        return self.counts - self.values.count_nonzero(1)

    def estimate_total(self, found: torch.Tensor) -> torch.Tensor:
        """Return () float32: estimated elements of all tensors, from `found` (tensors,) of them in the sample."""
        return (found * self.weights).sum()

    def checksums(self) -> torch.Tensor:
        """Return (tensors,) int64: checksums of the bits and places of values. Equal samples have equal checksums."""
        bits = self.values.view(torch.int32).to(torch.int64)
        return (bits * _odd(bits.shape[1], bits) * _MIXER).sum(1)


def checksum(sums: torch.Tensor) -> torch.Tensor:
    """Return () float32: one checksum of all tensors, from theirs."""
    return short((sums * _odd(len(sums), sums)).sum())


def short(sums: torch.Tensor) -> torch.Tensor:
    """Return float32 with 24 bits of each checksum: different ones become equal in 1 of 16 M cases."""
    return ((sums ^ (sums >> 24)) & 0xFFFFFF).to(torch.float32)


def _odd(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, device=like.device)


_MIXER = 0x9E3779B1
"""2^32 over the golden ratio, odd: spreads low bits over the word (Knuth, TAOCP 3, 6.4). Multiplied by turns it reaches
all places, whatever power of two the turns are multiples of."""


def send_numbers(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Send numbers from the host to `device`, without a wait: they are there once it reaches this operation. Does not
    depend on `torch.set_default_device` and `set_default_dtype`."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def meeting_place(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device to bring tensors together on: the first that is not the CPU. A copy from a device to the CPU
    would have to be waited for, or be read before it is complete."""
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))


def row_length(tensors: int) -> int:
    """Return the elements per row, for so many tensors within `BUDGET`."""
    return max(BUDGET // max(tensors, 1), 1)


def spread(tensor: torch.Tensor, most: int, turn: int = 0) -> torch.Tensor:
    """Return at most `most` elements at even distances, in memory order. A view where possible."""
    tensor = tensor.detach()
    size = tensor.numel()
    stride = -(-size // most)
    if not dense(tensor):
        tensor = tensor.contiguous().reshape(-1)  # a copy: reshape alone might return a view with gaps
    first = (turn * _MIXER >> 16) % stride if turn else 0
    return tensor.as_strided((-(-(size - first) // stride),), (stride,), tensor.storage_offset() + first)


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
