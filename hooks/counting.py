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


class Counting:
    """`ask` on any thread, `advance` on the one that trains."""

    def __init__(self, slots: Sequence[Slot], send: Callable[[wire.Message], None]) -> None:
        """`slots`: of the models."""
        self.asked = False
        self._slots, self._send = slots, send
        self._run: Generator[int, None, Census] | None = None
        self._seq = self._next_seq = 0
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
        if self._run is None:
            self._run = census(lambda: self._seq, self.models)
        try:
            self._next_seq = seq + next(self._run)
        except StopIteration as end:
            self._end()
            self._send(wire.Collected(what="census", seq=seq, content=msgspec.to_builtins(end.value)))
        except Exception:
            self._end()
            faults.swallow("the census of tensors", "without it")
        spent = time.perf_counter() - now
        self._not_before = now + spent / SHARE

    def _end(self) -> None:
        self._run, self.asked = None, False
        self._next_seq = 0

    def models(self) -> list[nn.Module]:
        """Those that are still there."""
        return [model for slot in self._slots if (model := slot.model()) is not None]
