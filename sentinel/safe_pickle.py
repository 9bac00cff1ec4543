"""Read pickles from untrusted sources: dicts, lists, tuples, strings and numbers; any import is refused, so that
nothing in them is called.

The address space is limited meanwhile: a list may hold itself a million times for two bytes each.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sentinel.errors import ConfigError

_GROWTH = 60
"""Bytes of Python objects for a byte of pickle, at most: a small dict takes 64 bytes, and two in the file."""
_ROOM = 256 * 1024**2


def load_pickle(path: Path, content: bytes, what: str) -> Any:
    """Return what a pickle holds. `path` and `what` are for messages. Raises ConfigError if it is damaged or would run
    code."""
    try:
        with limit_memory(len(content)):
            return _Unpickler(io.BytesIO(content)).load()
    except MemoryError:
        raise ConfigError(f"{path}: needs far more memory than its size says: not {what}") from None
    except Exception as error:  # damaged bytes may raise any exception
        raise ConfigError(f"{path}: not {what} ({str(error)[:200]})") from None


@contextlib.contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """Limit the address space to what is used now plus what a pickle of `size` bytes may take. The garbage collector,
    switched off meanwhile, would only slow the loading."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _address_space(size * _GROWTH + _ROOM):
            yield
    finally:
        if collecting:
            gc.enable()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it would import {module}.{name}, and data imports nothing".replace("\n", " "))

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


@contextlib.contextmanager
def _address_space(room: int) -> Iterator[None]:
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):  # not Linux: only the other bounds hold
        yield
        return
    wanted = used + room if soft == resource.RLIM_INFINITY else min(soft, used + room)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
