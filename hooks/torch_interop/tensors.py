"""Tensors as this package reads them: on which device, whether a graph is being captured, what their bytes say."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sentinel.hooks.torch_interop.strided_sample import meeting_place

CUDA: bool = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
"""Whether there can be a stream that records: with ROCm too."""


def pack_float32(column: torch.Tensor) -> bytes:
    """float32 bytes of a tensor in host memory. Without numpy, which the training side does not need."""
    column = column.detach().to(torch.float32).contiguous()
    return ctypes.string_at(column.data_ptr(), column.numel() * 4) if column.numel() else b""


def is_capturing() -> bool:
    """Whether the current CUDA stream records a graph: whatever is launched now would be part of every replay."""
    if not CUDA:
        return False
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


Scalar = float | torch.Tensor
"""A number, or a 0-dim tensor on a device, which is read later: reading it now would wait for the device."""


def scalar(tensor: torch.Tensor) -> Scalar:
    """The value of a one-element tensor: at once on the CPU, a copy that nobody changes on a device."""
    if tensor.is_cpu:  # and not its device's name, which takes as long as the value
        return float(tensor.item())
    return tensor.detach().reshape(()).to(torch.float32, copy=True)


def on_one_device(values: Sequence[Scalar]) -> Sequence[Scalar]:
    """The same, for arithmetic: tensors of two devices do not add up. (A model over several has its loss, and with it
    GradScaler's scale, on the last.)"""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return values
    device = meeting_place(tensors)
    return [value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for value in values]


def sum_of(one: Scalar, other: Scalar) -> Scalar:
    """Wherever they are."""
    if type(one) is float is type(other):
        return one + other
    one, other = on_one_device((one, other))
    return one + other


def is_finite(value: Scalar | None) -> bool:
    """False only where it is known that the value is NaN or infinite: one that is still on a device is not."""
    return not isinstance(value, float) or math.isfinite(value)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory: nobody can write to it, so it is always what it was."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def has_nonfinite(tensor: Tensor) -> bool:
    """Whether there is a NaN or an infinity in it. aminmax carries both, and is 13 times as fast as isfinite here."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.element_size() == 1:  # aminmax knows no float8
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return not bool(torch.isfinite(low) & torch.isfinite(high))
