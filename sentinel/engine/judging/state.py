"""The rules' state as bytes, and back.

It is pickled, because it is a graph of small objects with arrays in them; and it is read from files. So what is read
may be made of the engine's own classes, arrays and built-in containers, and of nothing else: no function is called.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

_OTHERS = {("array", "_array_reconstructor"), ("array", "array"), ("collections", "deque")}
_HOUSE = "sentinel.engine."
LAYOUT = 7
"""Counted up where an object that is part of a state has another class name or module, or other attributes, or means
something else by them: a daemon of the same version that is newer by that judges the last steps again."""


class RuleStateError(Exception):
    """What was read is not a state of this version."""


def dumps(state: object) -> bytes:
    """As bytes."""
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


def loads(state: bytes) -> Any:
    """What `dumps` took. Raises StateError."""
    try:
        return _Unpickler(_Bytes(state)).load()
    except Exception as error:  # damaged bytes raise whatever they happen to spell
        raise RuleStateError(f"not a state of the rules: {error}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return getattr(importlib.import_module(module), name)
        if module.startswith(_HOUSE) and name.isidentifier():
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise RuleStateError(f"{module}.{name} is no part of one")


class _Bytes:
    """As much of a file as the unpickler asks for. `io` is on the other side of the engine's fence."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        return part

    def readline(self) -> bytes:
        end = self._data.find(b"\n", self._at) + 1
        return self.read((end or len(self._data)) - self._at)
