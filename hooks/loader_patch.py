"""What stands around the `__next__` of a DataLoader's iterators: it tells how long the loop waited, and for what."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sentinel.hooks.fast_path_native import fetch_begins, fetch_ended

if TYPE_CHECKING:
    from sentinel.hooks.batches import Batches
    from sentinel.hooks.listener import Listener


class LoaderPatch:
    """`around` makes the function."""

    def __init__(self, tell: Callable[..., None], skipper: Callable[[object], Listener | None]) -> None:
        """`tell` is called with the event and its arguments. `skipper`: who wants the iterator's next batch thrown
        away, if anybody does."""
        self._tell, self._skipper = tell, skipper
        self._batches: Batches | None = None

    def serve(self, only: Listener | None) -> None:
        """The one run that is watched from now on; None where there are several, or none any more."""
        self._batches = only.batches if only is not None else None

    def around(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Stand around `original`, till `live` is [False]."""

        def __next__(iterator: Any) -> Any:
            if not live[0]:
                return original(iterator)
            begin, batches = perf_counter(), self._batches
            if not fetch_begins(batches):
                while skipper := self._skipper(iterator):
                    original(iterator)
                    skipper.skipped(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                self._tell("loader_exhausted", iterator)
                raise
            if not fetch_ended(batches, iterator, begin):
                self._tell("batch_fetched", iterator, perf_counter() - begin, batch)
            return batch

        return __next__
