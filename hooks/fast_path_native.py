"""The usual case of what is called at every step, in C (`_fast_path.c`), where that was built.

@learned               a class whose attributes the C code reads and writes
@called("step_begins") when an instance is called, that function is; and where something is unusual, or the C code
                       was not built, the `__call__` of the class
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

LAYOUT = 3
"""Of what Python and C know of each other. Count it up with each change of classes, slots or functions."""

try:
    import sentinel.hooks._fast_path as _fast_path
except ImportError:  # no C compiler when Sentinel was installed
    _MISSING = True
else:
    _MISSING = (
        getattr(_fast_path, "LAYOUT", 0) != LAYOUT
    )  # of other sources, where it was not built again after a change

_Class = TypeVar("_Class", bound=type)


def missing() -> bool:
    """Whether it was not built."""
    return _MISSING


def _not_done(*_: object) -> bool:
    return False


def _same(kind: _Class) -> _Class:
    return kind


learned: Callable[[Any], Any] = _same if _MISSING else _fast_path.learn
enter: Callable[[object], bool] = _not_done if _MISSING else _fast_path.enter
"""`FastPath._try_enter`: whether it did all that there was to be done."""
leave: Callable[[object], bool] = _not_done if _MISSING else _fast_path.leave
"""`FastPath._try_exit`, the same."""
fetch_begins: Callable[[object], bool] = _not_done if _MISSING else _fast_path.fetch_begins
"""Whether a batch may be fetched at once: nobody is to be told before, and none is to be thrown away."""
fetch_ended: Callable[[object, object, float], bool] = _not_done if _MISSING else _fast_path.fetch_ended
"""`Batches.batch_fetched`, the same."""


def called(function: str) -> Callable[[_Class], _Class]:
    """A class whose instances are called at every step. dynamo reads the `__call__` of the class."""
    return _same if _MISSING else lambda kind: _fast_path.call_first(kind, function)


def use(yes: bool = True) -> None:
    """Use it, or do all in Python."""
    if not _MISSING:
        _fast_path.use(yes)


def know(
    objects: dict[str, object],
    *,
    fast_seconds: float,
    batch_bytes: int,
    queue_steps: int,
    burst: int,
    burst_every: int,
) -> None:
    """What else it needs, once all classes are learned. From then on it is used."""
    if not _MISSING:
        _fast_path.know(objects, fast_seconds, batch_bytes, queue_steps, burst, burst_every)
