"""The usual case of what is called at every step, in C (`_fast_path.c`), where that was built.

    @learned                        a class whose attributes the C code reads and writes
    if not start(stopwatch, called):
        stopwatch.start(*called)    the unusual cases, and all of them where the C code was not built

Each answers whether it did all that there was to be done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    import sentinel.hooks._fast_path as _fast_path
except ImportError:  # no C compiler when Sentinel was installed
    _MISSING = True
else:
    _MISSING = False

_Class = TypeVar("_Class", bound=type)


def missing() -> bool:
    """Whether it was not built."""
    return _MISSING


def _nothing(*_: object) -> bool:
    return False


def _same(kind: _Class) -> _Class:
    return kind


learned: Callable[[Any], Any] = _same if _MISSING else _fast_path.learn
start: Callable[[object, tuple[Any, ...]], bool] = _nothing if _MISSING else _fast_path.start
stop: Callable[[object], bool] = _nothing if _MISSING else _fast_path.stop
backward_ended: Callable[[object, float, object], bool] = _nothing if _MISSING else _fast_path.backward_ended
enter: Callable[[object], bool] = _nothing if _MISSING else _fast_path.enter
leave: Callable[[object], bool] = _nothing if _MISSING else _fast_path.leave


def use(yes: bool = True) -> None:
    """Use it, or do all in Python."""
    if not _MISSING:
        _fast_path.use(yes)


def know(objects: dict[str, object], *, fast_seconds: float, batch_bytes: int, queue_steps: int) -> None:
    """What else it needs, once all classes are learned. From then on it is used."""
    if not _MISSING:
        _fast_path.know(objects, fast_seconds, batch_bytes, queue_steps)
