"""What stands around the `__next__` of a DataLoader's iterators: it tells how long the loop waited, and for what."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentinel.hooks.loop.loop_events import LoopEvents


class LoaderPatch:
    """`around` makes the function."""

    def __init__(
        self,
        tell: Callable[[str, Callable[[LoopEvents], object]], None],
        skipper: Callable[[object], LoopEvents | None],
    ) -> None:
        """`tell` takes the name of an event and the call that tells a listener of it.

        `skipper`: who wants the iterator's next batch thrown away, if anybody does.
        """
        self._tell, self._skipper = tell, skipper

    def around(self, original: Callable[..., Any], live: list[bool]) -> Callable[..., Any]:
        """Stand around `original`, until `live` is [False]."""

        def __next__(iterator: Any) -> Any:
            if not live[0]:
                return original(iterator)
            begin = perf_counter()
            while skipper := self._skipper(iterator):
                original(iterator)
                skipper.batch_skipped(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                self._tell("loader_exhausted", lambda run: run.loader_exhausted(iterator))
                raise
            seconds = perf_counter() - begin
            self._tell("batch_fetched", lambda run: run.batch_fetched(iterator, seconds, batch))
            return batch

        return __next__
