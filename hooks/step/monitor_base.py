"""How long an optimizer is watched: until it is gone, until it is watched no more, or until a fault of ours.

Its two hooks own its monitor and nothing else does, so that this dies with the optimizer; and with it the functions
that the user gave to `monitor.on_alert`. What these do may take long or raise, and neither the training nor the sender
waits for it. What they hold, a trainer with its model, they hold no longer than the optimizer lives: neither the
session nor their thread has them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sentinel.errors import RunStopped
from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.threads import Worker
from sentinel.hooks.core.unseen import Unseen
from sentinel.hooks.torch_interop import internals

if TYPE_CHECKING:
    from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor


class MonitorBase:
    """How long one optimizer is watched, and what happens when that ends: the base of `OptimizerMonitor`."""

    def __init__(self, optimizer: Any, unseen: Unseen) -> None:
        """`unseen` records faults."""
        self._unseen = unseen
        self.guard: Guard | None = None
        self.alerts = UserCallbacks()
        """Functions of the user's, that hold what they like: here, so that it dies with the optimizer."""
        self.stopped: RunStopped | None = None
        """What stopped the run, once we did."""
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
        return internals.depth(self._optimizer()) > 0

    def stop(self) -> None:
        """Do nothing from now on, even if hooks are still called."""
        self._dead = True

    def retire(self) -> None:
        """Stop, and give back what the restorer holds. On the training thread."""
        if self.guard is not None:
            self._call_guard(self.guard.close)
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
        """Of an error that passes, this step goes without; another fault is the end. See `Unseen.record_failure`."""
        kind = type(self._optimizer()).__name__
        if self._unseen.record_failure(f"steps of {kind}", f"the watch over {kind}", "unmonitored"):
            self.retire()

    def _recover(self) -> None:
        """A step was seen from its entry to its exit."""
        if self._unseen.pausing:
            self._unseen.recover(f"steps of {type(self._optimizer()).__name__}")

    def _suspect(self) -> None:
        if self.guard is not None:
            self._call_guard(self.guard.suspect)

    def _call_guard(self, call: Callable[..., None], *seq: int, **arguments: bool) -> None:
        if self._dead:
            return
        try:
            call(*seq, **arguments)
        except RunStopped as stop:
            self.stopped = stop
            raise
        except Exception:
            if self._unseen.record_failure("rollback", "rollback", "without rollback"):
                self.guard = None


class Guard(Protocol):
    """What acts at the two ends of a step: `rollback.StepGuard`."""

    def enter_step(self, seq: int) -> None:
        """First in the pre-hook."""

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        """Last in the post-hook, or at the end of a `GradScaler.step` that withheld the step."""

    def suspect(self) -> None:
        """This step looks odd."""

    def close(self) -> None:
        """There will be no more steps."""


class StepHook:
    """A hook of the optimizer. It owns the monitor."""

    def __init__(self, stream: OptimizerMonitor) -> None:
        self.stream = stream


class BeforeStep(StepHook):
    """Before a step."""

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stream.begins(args, kwargs)


class AfterStep(StepHook):
    """After it."""

    def __call__(self, *_: Any) -> None:
        self.stream.ends()


Alert = dict[str, Any]
_Functions = tuple[Callable[[Alert], object], ...]

QUEUE_ALERTS = 100
"""Alerts that wait for a slow function. Then the newest are dropped and counted."""


class UserCallbacks:
    """`add` on any thread, `put` on the sender's. Once the optimizer is gone, its thread hands over what waits, and
    ends."""

    def __init__(self) -> None:
        self.dropped = 0
        self.functions: _Functions = ()
        """Of the user's."""
        self._worker = Worker("sentinel-alerts")

    def add(self, function: Callable[[Alert], object]) -> None:
        """Call it at each alert from now on."""
        self.functions = (*self.functions, function)
        self._worker.start()

    def put(self, alert: Alert) -> None:
        """Hand the alert over; returns immediately."""
        if not self.functions:
            return
        if self._worker.waiting < QUEUE_ALERTS:
            self._worker.submit(functools.partial(_call_functions, alert, self.functions))
            return
        self.dropped += 1
        if self.dropped == 1:
            fault_guard.say("on_alert: a function is slower than the alerts come; some are not handed to it")


def _call_functions(alert: Alert, functions: _Functions) -> None:
    for function in functions:
        try:
            function(alert)
        except Exception:
            fault_guard.log.warning("sentinel: %r raised", function, exc_info=True)
