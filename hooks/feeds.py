"""How far the loader that trains has come, and how far it goes. The loader of an evaluation does not count."""

from __future__ import annotations

import weakref
from typing import Any

from sentinel.hooks.fast_path_native import learned


@learned
class Feed:
    """One iterator over a loader, and one pass after the other where its workers persist."""

    __slots__ = ("batches", "exhausted", "length", "source")

    def __init__(self, source: Any) -> None:
        self.source = weakref.ref(source)
        self.batches, self.exhausted = 0, False
        self.length = _length(source)


@learned
class Feeds:
    """All that give batches. The one that trains is the one whose batch came last before a step."""

    __slots__ = ("_known", "_whole", "last", "training")

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
        self.last: Feed | None = None
        """That gave the last batch."""
        self.training: Feed | None = None
        """The same, as it was at the exit of the last step."""
        self._whole = -1

    @property
    def batches(self) -> int:
        """That the loader gave since it began anew; -1: none was seen that trains."""
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
            self.last = self._of(source)
        if self.last.exhausted:
            self.last.batches, self.last.exhausted = 0, False
        self.last.batches += 1

    def ended(self, source: object) -> None:
        """An iterator has no more."""
        feed = self._of(source)
        feed.batches, feed.exhausted = (0 if feed.exhausted else feed.batches), True
        if feed is self.training:
            self._whole = feed.batches

    def _of(self, source: object) -> Feed:
        if source not in self._known:
            self._known[source] = Feed(source)
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
