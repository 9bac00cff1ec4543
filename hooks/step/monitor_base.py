"""Life of an optimizer monitor: until the optimizer is gone, watching it is stopped, or a fault of ours.

The optimizer's two hooks own its monitor and nothing else does, so that it dies with the optimizer; and with it the
functions that the user gave to `monitor.on_alert`. Such a function may take long or raise, and neither the training nor
the sender waits for it. What it holds, such as a trainer with its model, it holds no longer than the optimizer lives:
neither the session nor the thread that calls it holds a reference.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sentinel.errors import RunStopped
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.core.threads import Worker
from sentinel.hooks.torch_interop import internals

if TYPE_CHECKING:
    from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor


class MonitorBase:
    """Base of `OptimizerMonitor`: how long one optimizer is watched, and what happens when that ends."""

    def __init__(self, optimizer: Any, unseen: Unseen) -> None:
        """`unseen` records faults."""
        self._unseen = unseen
        self.guard: Guard | None = None
        self.alerts = UserCallbacks()
        """Functions of the user's, which may hold anything: kept here, so that it dies with the optimizer."""
        self.stopped: RunStopped | None = None
        """The exception with which we stopped the run, once we did."""
        self._optimizer = weakref.ref(optimizer)
        self._dead = False

    def watches(self, optimizer: object) -> bool:
        """Whether this monitor watches `optimizer`."""
        return self._optimizer() is optimizer

    def optimizer(self) -> Any:
        """Return the optimizer, or None when its user released it."""
        return self._optimizer()

    def alive(self) -> bool:
        """Whether the optimizer still exists and is watched."""
        return self._optimizer() is not None and not self._dead

    @property
    def inside(self) -> bool:
        """Whether the calling thread is inside the step: the hooks may be iterated over, and must not be removed."""
        return internals.depth(self._optimizer()) > 0

    def stop(self) -> None:
        """Do nothing from now on, even if hooks are still called."""
        self._dead = True

    def retire(self) -> None:
        """Stop, and release what the restorer holds. On the training thread."""
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
        """Handle an exception: a passing error costs this step, another fault ends the watch. See `Unseen`."""
        kind = type(self._optimizer()).__name__
        if self._unseen.record_failure(f"steps of {kind}", f"the watch over {kind}", "unmonitored"):
            self.retire()

    def _recover(self) -> None:
        """Record that a step was seen from its entry to its exit."""
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
    """Acts at both ends of a step: `rollback.StepGuard`."""

    def enter_step(self, seq: int) -> None:
        """Called first in the pre-hook."""

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        """Called last in the post-hook, or at the end of a `GradScaler.step` that withheld the step."""

    def suspect(self) -> None:
        """Called when the present step looks odd."""

    def close(self) -> None:
        """Called when no more steps will come."""


class StepHook:
    """A hook of the optimizer. It owns the optimizer monitor."""

    def __init__(self, monitor: OptimizerMonitor) -> None:
        self.monitor = monitor


class BeforeStep(StepHook):
    """The hook before a step."""

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.monitor.enter_step(args, kwargs)


class AfterStep(StepHook):
    """The hook after a step."""

    def __call__(self, *_: Any) -> None:
        self.monitor.exit_step()


Alert = dict[str, Any]
_Functions = tuple[Callable[[Alert], object], ...]

QUEUE_ALERTS = 100
"""Most alerts that wait for a slow function. Beyond them, the newest are dropped and counted."""


class UserCallbacks:
    """Calls the user's functions at alerts. `add` on any thread, `put` on the sender's. Once the optimizer is gone, its
    thread hands over the alerts that wait, and ends."""

    def __init__(self) -> None:
        self.dropped = 0
        self.functions: _Functions = ()
        """The user's functions, in the order in which they were added."""
        self._worker = Worker("sentinel-alerts")

    def add(self, function: Callable[[Alert], object]) -> None:
        """Call `function` at each alert from now on."""
        self.functions = (*self.functions, function)
        self._worker.start()

    def put(self, alert: Alert) -> None:
        """Queue the alert for the functions; returns immediately."""
        if not self.functions:
            return
        if self._worker.waiting < QUEUE_ALERTS:
            self._worker.submit(functools.partial(_call_functions, alert, self.functions))
            return
        self.dropped += 1
        if self.dropped == 1:
            faults.say("on_alert: a function is slower than the alerts come; some are not handed to it")


def _call_functions(alert: Alert, functions: _Functions) -> None:
    for function in functions:
        try:
            function(alert)
        except Exception:
            faults.log.warning("sentinel: %r raised", function, exc_info=True)
