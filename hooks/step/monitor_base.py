"""How long an optimizer is watched: until it is gone, until it is watched no more, or until a fault of ours.

A base of `Stream`, and not an object that it asks: in a loop of 3 ms each function call at a step is measurable.

What acts at a stream's steps besides its probes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sentinel.errors import RunStopped
from sentinel.hooks.core.unseen import Unseen
from sentinel.hooks.core.user_callbacks import UserCallbacks
from sentinel.hooks.torch_interop import dynamo

if TYPE_CHECKING:
    from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor


class MonitorBase:
    """How long one optimizer is watched, and what happens when that ends: the base of `Stream`."""

    __slots__ = ("__dict__", "__weakref__", "_dead", "guard")

    def __init__(self, optimizer: Any, unseen: Unseen) -> None:
        """`unseen` is told of faults."""
        self._unseen = unseen
        self.guard: Guard | None = None
        self.alerts = UserCallbacks()
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
        return dynamo.depth(self._optimizer()) > 0

    def stop(self) -> None:
        """Do nothing any more, hooks or not."""
        self._dead = True

    def retire(self) -> None:
        """Stop, and give back what the restorer holds. On the training thread."""
        self._call_guard("close")
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
        """Of an error that passes, this step goes without; another fault is the end. See `Unseen.failed`."""
        kind = type(self._optimizer()).__name__
        if self._unseen.record_failure(f"steps of {kind}", f"the watch over {kind}", "unmonitored"):
            self.retire()

    def _suspect(self) -> None:
        self._call_guard("suspect")

    def _call_guard(self, call: str, *seq: int, **arguments: bool) -> None:
        if self.guard is None or self._dead:
            return
        try:
            getattr(self.guard, call)(*seq, **arguments)
        except RunStopped as stop:
            self.stopped = stop.reason
            raise
        except Exception:
            if self._unseen.record_failure("rollback", "rollback", "without rollback"):
                self.guard = None


class Guard(Protocol):
    """What acts at the two ends of a step: `rollback.Restorer`."""

    def enter_step(self, seq: int) -> None:
        """First in the pre-hook."""

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        """Last in the post-hook, or at the end of a `GradScaler.step` that withheld the step."""

    def suspect(self) -> None:
        """This step looks odd."""

    def close(self) -> None:
        """There will be no more steps."""


class BackwardGroup(Protocol):
    """What takes steps inside a backward pass: `inbackward.Gathering`."""

    captured: bool
    """Whether the present pass is recorded into a CUDA graph."""

    @property
    def whole(self) -> object | None:
        """The stream of all of them. From the first such step on there are no others."""

    def enter_part(self, part: OptimizerMonitor) -> None:
        """This stream's optimizer steps there."""
