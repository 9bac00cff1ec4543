"""How long an optimizer is watched: until it is gone, until it is watched no more, or until a fault of ours.

A base of `Stream`, and not an object that it asks: in a loop of 3 ms each function call at a step is measurable.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from sentinel.errors import RunStopped
from sentinel.hooks import faults, nesting
from sentinel.hooks.alerts import Alerts
from sentinel.hooks.companions import Guard


class Lifetime:
    """How long one optimizer is watched, and what happens when that ends: the base of `Stream`."""

    __slots__ = ("__dict__", "__weakref__", "_dead", "guard")

    def __init__(self, optimizer: Any) -> None:
        self.guard: Guard | None = None
        self.alerts = Alerts()
        """Functions of the user's, that hold what they like: here, so that it dies with the optimizer."""
        self.stopped = ""
        """Why the run was stopped by us, once it was."""
        self._optimizer = weakref.ref(optimizer)
        self._dead = False

    def watches(self, optimizer: object) -> bool:
        """Whether it is this optimizer."""
        return self._optimizer() is optimizer

    def optimizer(self) -> Any:
        """The optimizer, or None when its user let go of it."""
        return self._optimizer()

    def alive(self) -> bool:
        """Whether there is still something to watch."""
        return self._optimizer() is not None and not self._dead

    @property
    def inside(self) -> bool:
        """Whether the calling thread steps: the hooks may be iterated over, and must not be taken away."""
        return nesting.depth(self._optimizer()) > 0

    def stop(self) -> None:
        """Do nothing any more, hooks or not."""
        self._dead = True

    def retire(self) -> None:
        """Stop, and give back what the restorer holds. On the training thread."""
        self._guarded("close")
        self.guard = None
        self.stop()

    # Faults of our own.

    def _safely(self, part: Callable[..., None], *arguments: object) -> None:
        if self._dead:
            return
        try:
            part(*arguments)
        except Exception:
            self._broke()

    def _broke(self) -> None:
        faults.swallow(f"the watch over {type(self._optimizer()).__name__}", "unmonitored")
        self.retire()

    def _suspect(self) -> None:
        self._guarded("suspect")

    def _guarded(self, call: str, *seq: int, **arguments: bool) -> None:
        if self.guard is None or self._dead:
            return
        try:
            getattr(self.guard, call)(*seq, **arguments)
        except RunStopped as stop:
            self.stopped = stop.reason
            raise
        except Exception:
            self.guard = None
            faults.swallow("rollback", "without rollback")
