"""Loops that fetch one batch ahead of the one they train on, to know which is the last.

    accelerate.data_loader                 always: so do Accelerate and the Hugging Face Trainer
    lightning.pytorch.loops.fetchers       where the loader has no length

What is noted of a batch is then told at the next fetch, when the loop gets it.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from sentinel.hooks.fast_path_native import learned

FRAMES = 12
"""Between the loader and whoever fetches ahead, at most."""
_ACCELERATE = "accelerate.data_loader"
_FETCHERS = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")

Noted = dict[str, float] | None


@learned
class Ahead:
    """What was noted of batches that the loop has yet to get, by the iterator that gave them."""

    __slots__ = ("_asked", "_waiting", "any")

    def __init__(self) -> None:
        self.any = False
        """Whether there is an iterator that is asked ahead of the loop."""
        self._waiting: weakref.WeakKeyDictionary[Any, Noted] = weakref.WeakKeyDictionary()
        """Of iterators that are asked ahead of the loop."""
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of which it is known whether they are."""

    def passed(self, source: object, noted: Noted) -> Noted:
        """`source` gave a batch: what was noted of the one that the loop gets."""
        if source not in self._asked:
            self._asked.add(source)
            if _is_ahead(sys._getframe(1)):
                self._waiting[source], self.any = None, True
        if source not in self._waiting:
            return noted
        before, self._waiting[source] = self._waiting[source], noted
        return before

    def last(self, source: object) -> Noted:
        """`source` has no more: what was noted of the batch that the loop gets last; None where it has it already."""
        return self._waiting.get(source)


def _is_ahead(frame: FrameType | None) -> bool:
    for _ in range(FRAMES):
        if frame is None:
            return False
        module = frame.f_globals.get("__name__")
        if module == _ACCELERATE:
            return True
        if module in _FETCHERS:
            fetcher = frame.f_locals.get("self")
            return getattr(fetcher, "length", 0) is None and getattr(fetcher, "prefetch_batches", 0) == 1
        frame = frame.f_back
    return False
