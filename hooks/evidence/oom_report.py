"""What memory was used for when an allocation failed, from the exception, which is not held up.

The exception is seen where a backward pass raises, where the `with` block of a monitor ends, and as the process ends.
On CUDA its message has the allocator's figures of that moment. The CPU's allocator keeps no such figures, so there the
resident set of the process stands for what is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.hooks.core.host_memory import memory_limit, resident_bytes
from sentinel.hooks.evidence.nonfinite_trace import library
from sentinel.hooks.torch_interop.layer_table import _is_fsdp, local, nbytes_of, plain_name
from sentinel.wire.evidence import OutOfMemory

_UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)


def post_mortem(
    error: BaseException, seq: int, models: Sequence[nn.Module], optimizers: Sequence[Any], *, backward: bool
) -> OutOfMemory:
    """Return the bytes of this rank's parts of the memory. `backward`: the error was raised by a backward pass."""
    parameters = {id(p): p for model in models for p in model.parameters()}
    parameters |= {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    text = str(error)
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    line, in_optimizer = _place(error.__traceback__)
    largest, size = _largest(models)
    return OutOfMemory(
        seq=seq,
        device=device.type,
        phase="backward" if backward else "optimizer" if in_optimizer else "forward",
        line=line,
        requested=_find_bytes(text, rf"ried to allocate {_SIZE}"),
        parameters=sum(nbytes_of(local(p)) for p in parameters.values()),
        gradients=sum(nbytes_of(local(p.grad)) for p in parameters.values() if p.grad is not None),
        buffers=sum(nbytes_of(local(buffer)) for model in models for buffer in model.buffers()),
        optimizer=sum(_state_bytes(one) for one in optimizers),
        largest_layer=largest,
        largest_layer_bytes=size,
        gathered=any(_is_fsdp(type(module)) for model in models for module in model.modules()),
        **(_on_device(text) if device.type != "cpu" else _on_host()),
    )


def _on_device(text: str) -> dict[str, int]:
    """Read the allocator's figures from the message (c10/cuda/CUDACachingAllocator.cpp).

    The size before `allowed` is set by set_per_process_memory_fraction.
    """
    allocated = _find_bytes(text, rf"{_SIZE} is allocated by PyTorch")
    idle = _find_bytes(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    return {
        "allocated": allocated,
        "reserved": allocated + idle,
        "free": _find_bytes(text, rf"of which {_SIZE} is free"),
        "limit": _find_bytes(text, rf"{_SIZE} allowed") or _find_bytes(text, rf"total capacity of {_SIZE}"),
    }


def _on_host() -> dict[str, int]:
    limit, used = memory_limit(), resident_bytes()
    if limit == float("inf"):
        return {"allocated": used, "reserved": used}
    return {"allocated": used, "reserved": used, "limit": int(limit), "free": max(int(limit) - used, 0)}


def _find_bytes(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _state_bytes(optimizer: Any) -> int:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return sum(nbytes_of(local(value)) for state in states for value in state.values() if isinstance(value, Tensor))


def _largest(models: Sequence[nn.Module]) -> tuple[str, int]:
    """Return the module with the largest parameters of its own, and their bytes in full: what a gather has to hold."""
    found = ("", 0)
    for model in models:
        for name, module in model.named_modules():
            size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))  # a DTensor's is global
            if size > found[1]:
                found = plain_name(f"{name}.").rstrip("."), size
    return found


def _place(trace: TracebackType | None) -> tuple[str, bool]:
    """Return the line of the user's code, and whether an optimizer ran."""
    line, in_optimizer = "", False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not library(file):
            line = f"{file}:{trace.tb_lineno}"
        in_optimizer = in_optimizer or file.startswith(_OPTIMIZERS)
        trace = trace.tb_next
    return line, in_optimizer
