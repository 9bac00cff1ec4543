"""The streams of a run. Held weakly: they die with their optimizers, whose hooks own them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from sentinel.hooks.inbackward import Gathering
from sentinel.hooks.stream import Stream


class Streams:
    """The streams of one run whose optimizers are still there. Read on any thread."""

    def __init__(self, parts: Sequence[Stream] = (), gathering: Gathering | None = None) -> None:
        """`parts`: one an optimizer; `gathering` makes one of them all, where they step inside the backward pass."""
        self._parts = [weakref.ref(part) for part in parts]
        self.gathering = gathering

    @property
    def parts(self) -> list[Stream]:
        """Those whose optimizer is still there."""
        return [stream for ref in self._parts if (stream := ref()) is not None]

    @property
    def live(self) -> list[Stream]:
        """The same; of optimizers that step inside the backward pass the one that they have together."""
        parts = self.parts
        whole = self.gathering.whole if self.gathering is not None else None
        return [whole] if whole is not None and parts else parts

    @property
    def awake(self) -> bool:
        """Whether a probe may look at this backward pass. Parts of one stream say so as long as they live."""
        for ref in self._parts:
            stream = ref()
            if stream is not None and stream.probes.awake:
                return True
        return False
