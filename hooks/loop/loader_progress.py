"""How far the loader that trains has come, and how far it goes. The loader of an evaluation does not count.

Loops that fetch one batch ahead of the one they train on, to know which is the last.

    accelerate.data_loader                 always: so do Accelerate and the Hugging Face Trainer
    lightning.pytorch.loops.fetchers       where the loader has no length

What is noted of a batch is then told at the next fetch, when the loop gets it.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any


class LoaderPass:
    """One iterator over a loader, and one pass after the other where its workers persist."""

    def __init__(self, source: Any) -> None:
        self.source = weakref.ref(source)
        self.batches, self.exhausted = 0, False
        self.length = _length(source)


class LoaderProgress:
    """All that give batches. The one that trains is the one whose batch came last before a step."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
        self.last: LoaderPass | None = None
        """That gave the last batch."""
        self.training: LoaderPass | None = None
        """The same, as it was at the exit of the last step."""
        self._whole = -1

    @property
    def batches(self) -> int:
        """That the loader gave since it started over; -1: none was seen that trains."""
        return self.training.batches if self.training is not None else -1

    @property
    def exhausted(self) -> bool:
        """Whether it has given its last."""
        return self.training is not None and self.training.exhausted

    @property
    def length(self) -> int:
        """Batches of a whole pass: as the sampler says, or as the last pass had; -1: not known."""
        said = self.training.length if self.training is not None else -1
        return said if said >= 0 else self._whole

    def is_last(self, source: object) -> bool:
        """Whether it gave the last batch."""
        return self.last is not None and self.last.source() is source

    def gave(self, source: object) -> None:
        """An iterator gave a batch."""
        if self.last is None or not self.is_last(source):
            self.last = self._find_feed(source)
        if self.last.exhausted:
            self.last.batches, self.last.exhausted = 0, False
        self.last.batches += 1

    def record_end(self, source: object) -> None:
        """An iterator has no more."""
        feed = self._find_feed(source)
        feed.batches, feed.exhausted = (0 if feed.exhausted else feed.batches), True
        if feed is self.training:
            self._whole = feed.batches

    def _find_feed(self, source: object) -> LoaderPass:
        if source not in self._known:
            self._known[source] = LoaderPass(source)
        return self._known[source]


def _length(source: object) -> int:
    """Batches of a DataLoader's pass by torch's own samplers. A sampler of the user's is not asked: it may draw random
    numbers to answer."""
    sampler: Any = getattr(source, "_index_sampler", None)
    inner = sampler
    while inner is not None:
        if not type(inner).__module__.startswith("torch.utils.data."):
            return -1
        inner = getattr(inner, "sampler", None)
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # there is none, or its data have no length
        return -1


FRAMES = 12
"""Between the loader and whoever fetches ahead, at most."""
_ACCELERATE = "accelerate.data_loader"
_FETCHERS = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")

Noted = dict[str, float] | None


class FetchAhead:
    """What was noted of batches that the loop has yet to get, by the iterator that gave them."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, Noted] = weakref.WeakKeyDictionary()
        """Of iterators that are asked ahead of the loop."""
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of which it is known whether they are."""

    def swap_notes(self, source: object, noted: Noted) -> Noted:
        """`source` gave a batch: what was noted of the one that the loop gets."""
        if source not in self._asked:
            self._asked.add(source)
            if _is_ahead(sys._getframe(1)):
                self._waiting[source] = None
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
