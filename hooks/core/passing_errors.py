"""Errors of the machine that pass: no memory, descriptor, thread or room on the disk was to be had at that moment; and
how long something is tried again."""

from __future__ import annotations

import errno
import time

import torch

RETRY_SECONDS = 60.0
"""How long a read that fails is tried again before training: a file server that is away comes back."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0
_NUMBERS = frozenset(
    {
        errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EINTR
    }
)  # fmt: skip
_NO_MEMORY = ("can't allocate memory", "out of memory")
"""Of torch's allocator on the CPU (c10/core/impl/alloc_cpu.cpp), of CUDA's driver and of MPS."""
_NO_THREAD = "can't start new thread"
"""What Python makes of EAGAIN there."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, and not something else."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_passing(error: BaseException) -> bool:
    """Whether the same may succeed a moment later. Also where it is the cause of the error, as of a RollbackError."""
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return True
    if is_out_of_memory(error) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error)):
        return True
    return error.__cause__ is not None and is_passing(error.__cause__)


class Retry:
    """One thing that is tried again, with growing pauses. The time counts from the first pause on: what came before it
    may have been the wait for another rank."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS

    @property
    def over(self) -> bool:
        """Whether it was tried for long enough."""
        return self._begun is not None and time.monotonic() - self._begun > RETRY_SECONDS

    def pause(self) -> None:
        """Wait for the next try."""
        if self._begun is None:
            self._begun = time.monotonic()
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
