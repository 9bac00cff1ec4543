"""Convert the rules' state to bytes, and back.

It is pickled, because it is a graph of small objects with arrays in them; and it is read from files. So the bytes may
contain only the engine's own classes, arrays and built-in containers: no function is called.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

_OTHERS = {("array", "_array_reconstructor"), ("array", "array"), ("collections", "deque")}
_HOUSE = "sentinel.engine."
LAYOUT = 7
"""Version of the state, raised where an object in it has another class name or module, other attributes, or attributes
with another meaning: a daemon of the same version but with a newer layout judges the last steps again."""


class RuleStateError(Exception):
    """Raised for bytes that are not a state of this version."""


def dumps(state: object) -> bytes:
    """Return the state as bytes."""
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)


def loads(state: bytes) -> Any:
    """Return the state that `dumps` took. Raises RuleStateError."""
    try:
        return _Unpickler(_Bytes(state)).load()
    except Exception as error:  # damaged bytes may raise any exception
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
    """A readable object for the unpickler. `io` may not be imported in the engine."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, size: int) -> bytes:
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        return part

    def readline(self) -> bytes:
        end = self._data.find(b"\n", self._at) + 1
        return self.read((end or len(self._data)) - self._at)
