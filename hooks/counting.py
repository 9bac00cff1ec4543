"""Takes a census in the pauses between steps, a tenth of the time at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

import msgspec
from torch import nn

from sentinel import wire
from sentinel.collected import Census
from sentinel.hooks import faults
from sentinel.hooks.census import census
from sentinel.hooks.kept import Slot

SHARE = 0.1
"""Of the loop's time."""
LEAST_STEPS = 8
"""Between the two counts, where the run ends between them."""
LAST_SECONDS = 1.0
"""For what is left of a census when the run ends. The daemon waits a little longer."""
_TOO_SHORT = "who holds it: the run ended before what Python holds had been counted a second time"


class Counting:
    """`ask` on any thread, `advance` on the one that trains."""

    def __init__(self, slots: Sequence[Slot], send: Callable[[wire.Message], None]) -> None:
        """`slots`: of the models."""
        self.asked = False
        self._slots, self._send = slots, send
        self._run: Generator[int, None, Census] | None = None
        self._seq = self._next_seq = self._first = 0
        self._not_before = 0.0

    def ask(self) -> None:
        """Begin at the next step, unless one is under way."""
        self.asked = True

    def advance(self, seq: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        self._seq = seq
        if seq < self._next_seq or now < self._not_before:
            return
        self._part()
        spent = time.perf_counter() - now
        self._not_before = now + spent / SHARE

    def conclude(self) -> None:
        """The run ends, and there is nobody to be held up: what was asked for is told now, as far as it is known."""
        until = time.perf_counter() + LAST_SECONDS
        if self._run is not None and self._seq - self._first >= LEAST_STEPS:
            while self.asked and time.perf_counter() < until:
                self._part()

    def decline(self, seq: int) -> None:
        """There is nothing to be counted any more."""
        if self.asked:
            self._end()
            self._tell(Census(seq=seq, steps=0, missing=(_TOO_SHORT,)))

    def _part(self) -> None:
        if self._run is None:
            self._run, self._first = census(lambda: self._seq, self.models), self._seq
        try:
            self._next_seq = self._seq + next(self._run)
        except StopIteration as end:
            self._end()
            self._tell(end.value)
        except Exception:
            self._end()
            faults.swallow("the census of tensors", "without it")

    def _tell(self, found: Census) -> None:
        self._send(wire.Collected(what="census", seq=found.seq, content=msgspec.to_builtins(found)))

    def _end(self) -> None:
        self._run, self.asked = None, False
        self._next_seq = 0

    def models(self) -> list[nn.Module]:
        """Those that are still there."""
        return [model for slot in self._slots if (model := slot.model()) is not None]
