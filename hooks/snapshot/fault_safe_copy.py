"""Copies memory that the loop may free meanwhile, as `resize_(0)` and a first `share_memory_()` do.

memmove would read on there, and the process would die of SIGSEGV. The kernel, asked to copy from the process itself
by process_vm_readv(2), stops where nothing is any more and says so. What was freed and is somebody else's by then is
copied all the same: whether tensors are where they were is for `snapshot_arena.WriteDetector` to tell.
"""

from __future__ import annotations

import ctypes
import errno
import os

import torch
from torch import Tensor


class _Stretch(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LONGEST = 1 << 30
"""Bytes of one call: the kernel takes 2 GiB less a page at most."""
_PIECE = 1 << 24
"""Bytes from the first to the last element of what is copied in one go where there are gaps."""
_read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None) if os.name == "posix" else None
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = (ctypes.c_int, *(ctypes.POINTER(_Stretch), ctypes.c_ulong) * 2, ctypes.c_ulong)


def copy_bytes(to: int, source: int, nbytes: int) -> bool:
    """Copy so many bytes from address `source` to address `to`, without the GIL; answer whether all were there.

    Where there is no such call, or it is forbidden (seccomp), memmove copies, and trusts that they are.
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
    """The same of a tensor in host memory with gaps between its elements: they are copied along with them, and left
    behind here. Some 16 MB more are taken meanwhile."""
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
    """Bytes that were copied; -1 and errno where none was."""
    if _read is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    ours, theirs = _Stretch(to, length), _Stretch(source, length)
    return int(_read(os.getpid(), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))
