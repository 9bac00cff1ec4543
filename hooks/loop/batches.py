"""Where the run's batches come from: measured, and skipped after a rollback if the user armed that."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader

from sentinel.hooks.core import fault_guard
from sentinel.hooks.loop.batch_fingerprint import BatchFingerprints
from sentinel.hooks.loop.loader_progress import FetchAhead
from sentinel.hooks.loop.step_accumulator import StepAccumulator

Batch = TypeVar("Batch")
_IDENTITY = "the identity of batches"
"""What is not seen where they cannot be looked at, in words."""


class Batches:
    """The training loader of a run: the one given as `attach(loader=)`, or whatever goes through `monitor.batches`."""

    def __init__(self, accumulator: StepAccumulator, loader: Any = None) -> None:
        self._accumulator = accumulator
        self._sampler = loader._index_sampler if isinstance(loader, DataLoader) else None
        self._known = loader is not None
        self._to_skip = 0
        self._outer = 0
        self._contents: BatchFingerprints | None = BatchFingerprints()
        """None once it failed."""
        self._ahead = FetchAhead()

    def skip(self, count: int) -> None:
        """Throw away the next `count` batches. At the end of an epoch the rest is left for the next."""
        if count and not self._known:
            fault_guard.say(
                "batches cannot be skipped: pass attach(loader=...), or iterate over monitor.batches(loader)"
            )
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
            self._accumulator.batch_fetched(iterator, seconds, self._describe(batch, iterator))

    def _describe(self, batch: object, source: object) -> dict[str, float] | None:
        try:
            if self._contents is None or not self._accumulator.is_training_thread():
                return None
            looked_at = self._ahead.swap_notes(source, self._contents.describe_batch(batch, source))
            if self._accumulator.unseen.pausing:
                self._accumulator.unseen.restore(_IDENTITY)
            return looked_at
        except Exception:
            if self._accumulator.unseen.record_failure(_IDENTITY, "batches", "without the identity of batches"):
                self._contents = None
            return None

    def loader_exhausted(self, iterator: object) -> None:
        """A DataLoader's iterator gave its last batch before. Inside `watch` that is told of what is watched."""
        if self._contents is not None and self._accumulator.is_training_thread():
            self._contents.begin_anew()
        if not self._outer:
            self._accumulator.loader_exhausted(iterator)
            if (noted := self._ahead.last(iterator)) is not None and self._accumulator.is_training_thread():
                self._accumulator.totals.batch = noted

    def to_skip(self, iterator: object) -> bool:
        """Whether the batch that comes next from a DataLoader's iterator is to be thrown away."""
        ours = self._sampler is not None and getattr(iterator, "_index_sampler", None) is self._sampler
        return ours and not self._outer and self._to_skip > 0

    def record_skip(self) -> None:
        """A batch was thrown away. Told only then: the end of an epoch is none."""
        self._to_skip -= 1

    def pull(self, iterator: Iterator[Batch], source: object) -> Batch:
        """The next batch that is not to be skipped, `source` being what pulls. Raises StopIteration at the end."""
        begin = time.perf_counter()
        self._accumulator.next_iteration()
        self._outer += 1
        try:
            while self._to_skip:
                next(iterator)
                self.record_skip()
            batch = next(iterator)
        except StopIteration:
            with fault_guard.swallow_faults("batches", "the end of the loader is not seen"):
                self._accumulator.loader_exhausted(source)
            raise
        finally:
            self._outer -= 1
        with fault_guard.swallow_faults("batches", "the wait for data is not seen"):
            self._accumulator.batch_fetched(source, time.perf_counter() - begin, self._describe(batch, source))
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
