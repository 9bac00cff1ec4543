"""Whether the snapshots will fit: what they need against what the machine, or the job's cgroup, has left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sentinel.errors import RollbackError
from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.host_memory import memory_left
from sentinel.hooks.torch_interop.internals import release_pinned_memory
from sentinel.hooks.torch_interop.layer_table import local

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
"""How many times the size of its parameters an optimizer of torch.optim keeps (read in its `_init_group`). Others
are taken for an Adam in float32."""


class Budget:
    """Holds the snapshots to what is left. Called by the ring with the bytes of one snapshot, before they are there."""

    def __init__(self, keep: int, root: Path = Path("/")) -> None:
        self._keep, self._root = keep, root
        self._granted = 0

    def __call__(self, nbytes: int) -> None:
        """Raises RollbackError, with the figures and the fix, where `keep` snapshots of this size are too many."""
        if nbytes > self._granted:
            self._check(nbytes, nbytes - self._granted, 1)
            self._granted = nbytes

    def expect(self, nbytes: int, ranks: int = 1) -> None:
        """The same of an estimate, before any of the node's `ranks` has taken its part: what is really allocated will
        be held to what is left then."""
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
    """Bytes of one snapshot: parameters and buffers, optimizer state (estimated where there is none yet), and the
    tensors nested in `extra`."""
    size = sum(map(_size, tensors)) + sum(map(_state_bytes, optimizers)) + sum(map(_size, _tensors(extra)))
    return round_up_pinned(size) if any(tensor.is_cuda for tensor in tensors) else size


def round_up_pinned(size: int) -> int:
    """Bytes that torch takes for so many of pinned memory: a power of two (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0


def give_back() -> None:
    """Return pinned memory that nobody holds to the system: torch keeps it for whoever pins as much again. Waits for
    the GPUs; one that has failed is no reason to raise."""
    with fault_guard.swallow_faults("giving pinned memory back", "torch keeps it"):
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
