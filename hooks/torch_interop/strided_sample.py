"""Elements of many tensors, a few of each at even distances, as one matrix: what tier 3 looks at instead of all.

A row holds a tensor's elements in the order in which they lie in memory, so that a parameter and its gradient give the
same places. A tensor that is no longer than a row is there as a whole, and its statistics are exact; of a longer one
they are estimates: of 1,000 elements a share is off by 1.6 percentage points (one standard error) at most, a norm by
2 % where they are Gaussian. Places are fixed: ranks that hold the same parameters sample the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BUDGET = 1 << 16
"""Elements of one sample. Three are taken in a step (weights before and after, gradients), under 256 k together."""


class Sample:
    """Elements of many tensors as one matrix, a row for each tensor. `each`: elements in a row."""

    def __init__(self, tensors: Sequence[torch.Tensor], each: int, turn: int = 0) -> None:
        """None of `tensors` may be empty. Where some are on a device and others not, the sample is on the device. Each
        `turn` takes other elements of those that are longer than a row."""
        device = meeting_place(tensors)
        rows = [spread(tensor, each, turn) for tensor in tensors]
        counts = [row.numel() for row in rows]
        self.values = torch.zeros(len(tensors), each, dtype=torch.float32, device=device)
        """(tensors, each) float32; what is not filled is 0."""
        into = [row if n == each else row.narrow(0, 0, n) for row, n in zip(self.values.unbind(), counts, strict=True)]
        torch._foreach_copy_(into, rows, non_blocking=True)
        self.counts = send_numbers(counts, torch.int64, device)
        """(tensors,) int64: elements that were taken."""
        self.size = sum(tensor.numel() for tensor in tensors)
        """Elements that there are."""
        standing = [tensor.numel() / n for tensor, n in zip(tensors, counts, strict=True)]
        self.weights = send_numbers(standing, torch.float32, device)
        """(tensors,) float32: elements that each of them stands for."""

    def norms(self) -> torch.Tensor:
        """(tensors,) float32: L2 norm, estimated."""
        return (self.values.square().sum(1) * self.weights).sqrt_()

    def zeros(self) -> torch.Tensor:
        """(tensors,) int64: sampled elements that are 0."""
        return self.counts - self.values.count_nonzero(1)

    def estimate_total(self, found: torch.Tensor) -> torch.Tensor:
        """() float32: how many elements of all tensors it is, of which there are `found`, (tensors,), in the sample."""
        return (found * self.weights).sum()

    def checksums(self) -> torch.Tensor:
        """(tensors,) int64: of the bits of each tensor's values, and their places. Equal samples have equal ones."""
        bits = self.values.view(torch.int32).to(torch.int64)
        return (bits * _odd(bits.shape[1], bits) * _MIXER).sum(1)


def checksum(sums: torch.Tensor) -> torch.Tensor:
    """() float32: one of all tensors, from theirs."""
    return short((sums * _odd(len(sums), sums)).sum())


def short(sums: torch.Tensor) -> torch.Tensor:
    """Float32 that holds 24 bits of each: different ones are equal in 1 of 16 M cases."""
    return ((sums ^ (sums >> 24)) & 0xFFFFFF).to(torch.float32)


def _odd(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, device=like.device)


_MIXER = 0x9E3779B1
"""2^32 over the golden ratio, odd: spreads low bits over the word (Knuth, TAOCP 3, 6.4). As a factor of turns it comes
by all places, whatever power of two the turns are multiples of."""


def send_numbers(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host, on `device` once it comes to them: whatever `torch.set_default_device` and
    `set_default_dtype` say, and without a wait."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)


def meeting_place(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device to bring them together on: the first that is no CPU. What comes from a device to the CPU has to be
    waited for, or is read before it is there."""
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))


def row_length(tensors: int) -> int:
    """Elements in a row, for so many tensors within `BUDGET`."""
    return max(BUDGET // max(tensors, 1), 1)


def spread(tensor: torch.Tensor, most: int, turn: int = 0) -> torch.Tensor:
    """At most `most` elements of a tensor at even distances, as they lie in memory. A view where it can be one."""
    tensor = tensor.detach()
    size = tensor.numel()
    stride = -(-size // most)
    if not dense(tensor):
        tensor = tensor.contiguous().reshape(-1)  # a copy: reshape alone would give a view with gaps, where it can
    first = (turn * _MIXER >> 16) % stride if turn else 0
    return tensor.as_strided((-(-(size - first) // stride),), (stride,), tensor.storage_offset() + first)


def dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
