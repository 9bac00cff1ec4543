"""Where the run's batches come from: measured, and skipped after a rollback if the user armed that."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from sentinel.hooks import faults
from sentinel.hooks.ahead import Ahead
from sentinel.hooks.contents import Contents
from sentinel.hooks.fast_path_native import learned
from sentinel.hooks.tally import Ledger

Batch = TypeVar("Batch")


@learned
class Batches:
    """The training loader of a run: the one given as `attach(loader=)`, or whatever goes through `monitor.batches`."""

    __slots__ = ("_ahead", "_contents", "_known", "_ledger", "_outer", "_sampler", "_to_skip")

    def __init__(self, ledger: Ledger, loader: Any = None) -> None:
        self._ledger = ledger
        self._sampler = loader._index_sampler if isinstance(loader, DataLoader) else None
        self._known = loader is not None
        self._to_skip = 0
        self._outer = 0
        self._contents: Contents | None = Contents()
        """None once it failed."""
        self._ahead = Ahead()

    def skip(self, count: int) -> None:
        """Throw away the next `count` batches. At the end of an epoch the rest is left for the next."""
        if count and not self._known:
            faults.say("batches cannot be skipped: pass attach(loader=...), or iterate over monitor.batches(loader)")
            return
        self._to_skip += max(count, 0)

    def watch(self, loader: Iterable[Batch]) -> _Watched[Batch]:
        """`loader`, with the wait for each batch measured."""
        self._known = True
        return _Watched(self, loader)

    # From the patched DataLoader.

    def batch_fetched(self, iterator: object, seconds: float, batch: object) -> None:
        """A DataLoader's iterator gave a batch. Inside `watch` that is measured already."""
        if not self._outer:
            self._ledger.batch_fetched(iterator, seconds, self._looked_at(batch, iterator))

    def _looked_at(self, batch: object, source: object) -> dict[str, float] | None:
        try:
            if self._contents is None or not self._ledger.here():
                return None
            return self._ahead.passed(source, self._contents.of(batch, source))
        except Exception:
            self._contents = None
            faults.swallow("batches", "without the identity of batches")
            return None

    def loader_exhausted(self, iterator: object) -> None:
        """A DataLoader's iterator gave its last batch before. Inside `watch` that is told of what is watched."""
        if self._contents is not None and self._ledger.here():
            self._contents.begin_anew()
        if not self._outer:
            self._ledger.loader_exhausted(iterator)
            if (noted := self._ahead.last(iterator)) is not None and self._ledger.here():
                self._ledger.tally.batch = noted

    def to_skip(self, iterator: object) -> bool:
        """Whether the batch that comes next from a DataLoader's iterator is to be thrown away."""
        ours = self._sampler is not None and getattr(iterator, "_index_sampler", None) is self._sampler
        return ours and not self._outer and self._to_skip > 0

    def skipped(self) -> None:
        """A batch was thrown away. Told only then: the end of an epoch is none."""
        self._to_skip -= 1

    def pull(self, iterator: Iterator[Batch], source: object) -> Batch:
        """The next batch that is not to be skipped, `source` being what pulls. Raises StopIteration at the end."""
        begin = time.perf_counter()
        self._ledger.next_iteration()
        self._outer += 1
        try:
            while self._to_skip:
                next(iterator)
                self.skipped()
            batch = next(iterator)
        except StopIteration:
            with faults.shielded("batches", "the end of the loader is not seen"):
                self._ledger.loader_exhausted(source)
            raise
        finally:
            self._outer -= 1
        with faults.shielded("batches", "the wait for data is not seen"):
            self._ledger.batch_fetched(source, time.perf_counter() - begin, self._looked_at(batch, source))
        return batch


class _Watched(Generic[Batch]):
    """An iterable that is as the loader it wraps: as often iterated, as long, with its attributes."""

    def __init__(self, batches: Batches, loader: Iterable[Batch]) -> None:
        self._batches, self._loader = batches, loader

    def __iter__(self) -> Iterator[Batch]:
        return _Pull(self._batches, iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is one of the loader, and of no run."""
        return copy.copy, (self._loader,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


class _Pull(Generic[Batch]):
    def __init__(self, batches: Batches, iterator: Iterator[Batch]) -> None:
        self._batches, self._iterator = batches, iterator

    def __iter__(self) -> _Pull[Batch]:
        return self

    @property
    def _index_sampler(self) -> Any:
        """Of the DataLoader's iterator within."""
        return getattr(self._iterator, "_index_sampler", None)

    def __next__(self) -> Batch:
        return self._batches.pull(self._iterator, self)
