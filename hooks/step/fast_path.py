"""The fast path: steps of which only the loss is taken, and the norm where the loop computed it itself.

In a loop of 3 ms the processor's caches hold the model's code and data and not ours: each function that is called there
costs a microsecond, and a step that is measured in full calls many (see docs/performance.md). So stretches of steps
take the fast path: hooks and patches check that the loss is within the noise, up to
`StepAccumulator.fast_path_loss_limit`, store it, and call nothing else. The record of the next step that is measured in
full includes what happened meanwhile; that step is at the latest the first whose loss is outside the noise.

Where it costs little, the gradient norm is checked in the same way. It is not sent, as every value of every step costs
the sender and the daemon more than it costs here; only the last one before an odd step is, with which a diagnosis tells
whether gradient or loss moved first.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from sentinel.errors import RunStopped
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.core.threads import UserCallbacks
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.loop.grad_clipping import Clip, Clipping
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.measure.kernels import measure_in_one_pass
from sentinel.hooks.measure.probe import OCCASION, Probes
from sentinel.hooks.step.loss_outliers import OutlierWatch
from sentinel.hooks.torch_interop import internals
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import is_finite
from sentinel.hooks.transport.records import QUEUE_STEPS, Record

if TYPE_CHECKING:
    from sentinel.hooks.step.optimizer_in_backward import BackwardGathering

NOTE_SECONDS = 1.0
"""Least seconds between two looks at where in the code a step is taken: one costs 30 to 90 us. A notebook's cell that
is run after a pause is known from its first step."""


class MonitorSession(Protocol):
    """What an optimizer monitor uses of the session that it belongs to."""

    accumulator: StepAccumulator
    governor: Governor

    @property
    def queued(self) -> deque[Record]:
        """The records that wait to be sent. An ordinary one may be appended directly while there is room."""

    def submit(self, record: Record, urgent: bool) -> None:
        """Queue a record; send it without delay if it is urgent."""


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


class FastPath:
    """Base of `OptimizerMonitor`: until when one optimizer is watched, and its steps on the fast path. A base class and
    not an attribute, to spare a call."""

    def __init__(self, session: MonitorSession, optimizer: Any, layers: Layers, probes: Probes) -> None:
        self._unseen = session.accumulator.unseen
        self.guard: Guard | None = None
        self.alerts = UserCallbacks()
        """Functions of the user's, which may hold anything: kept here, so that it dies with the optimizer. Neither the
        session nor the thread that calls them holds a reference."""
        self.stopped: RunStopped | None = None
        """The exception with which we stopped the run, once we did."""
        self._optimizer = weakref.ref(optimizer)
        self._dead = False
        self.seq = 0
        """Sequence number of the next step."""
        self.layers = layers
        self.collector: EvidenceCollector | None = None
        self.within: BackwardGathering | None = None
        """Gathers the steps of optimizers that step inside the backward pass; None for an optimizer that does not."""
        self.is_only_optimizer = False
        """Whether this run has no other optimizer. Where there are several, each fills the shared totals directly."""
        self.probes, self._accumulator, self._governor = probes, session.accumulator, session.governor
        self._submit, self._queued, self._append = session.submit, session.queued, session.queued.append
        self._clipping = Clipping(lambda: layers.trained_ids)
        self._outlier_watch = OutlierWatch(session.governor, weakref.WeakMethod(self._suspect), first=not layers.stream)
        self._losses = self._outlier_watch.unjudged
        self._note_at = 0.0
        self._previous_exit: float | None = None
        self._own_since_timed_exit = 0.0
        """Seconds that were ours since the exit of the last step whose times were taken."""
        self._inside = 0
        """How deep the call is between the hooks: a subclass's step may call its parent's. Not reset by a step that
        raised."""
        self._on_fast_path = False
        """Whether the step that has begun is on the fast path."""
        self._loss = 0.0
        self._clip: Clip | None = None
        """The clipping before that step, as known when it began."""
        self._clipped = False
        """Whether the loop clipped since the last step."""
        self._entered_at = 0.0
        self._stretch_end = 0
        """The first step that must be measured in full again."""
        self._stretch_steps = 0
        self._stretch_seconds = self._stretch_own = self._stretch_norms = 0.0
        """Steps on the fast path since the last one off it, the seconds they took, the part of these that was ours, and
        the part of this for gradient norms."""
        self._checks_norm = False
        """Whether the gradient norm is checked in this stretch."""
        self._last_norm: tuple[int, float] | None = None
        """The newest step whose gradient norm was checked and found usual, and that norm."""

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
        if self._last_norm is not None and self._last_norm[0] < self.seq:  # else its step has no record yet
            (seq, norm), self._last_norm = self._last_norm, None
            values = {"grad_norm": norm, "grad_norm_applied": norm}
            self._submit(Record(self.layers.stream, seq, time.time(), self.layers.table, values), False)
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

    def begin_stage(self) -> None:
        """Forget what is usual: the next step's task or data change on purpose, and so may its loss."""
        self._outlier_watch.forget()
        self.probes.forget()
        if not self.layers.stream:
            self._governor.begin_stage(self.seq)

    def _begin_stretch(self) -> None:
        """Put the next steps on the fast path where that is enough; called after a step that was measured in full."""
        probes, collector, accumulator = self.probes, self.collector, self._accumulator
        accumulator.disturbed = False  # before reading anything that another thread may change
        occasion = self.seq // OCCASION * OCCASION + OCCASION - 1  # at the end of this step, probes are armed
        self._stretch_end = min(self._governor.fast_path_end(self.seq), occasion)
        if (
            self.seq < self._stretch_end
            and self.is_only_optimizer
            and probes.all_skippable
            and not probes.awake
            and not accumulator.totals.logged
            and not (collector is not None and (collector.moments_asked or collector.object_growth.asked))
            and self._previous_exit is not None
        ):
            accumulator.allow_fast_path(self._outlier_watch.loss_limit)
            self._checks_norm = (
                self._governor.checks_norm_on_fast_path and bool(self.layers.plain) and not self.layers.frozen
            )

    def _end_stretch(self) -> None:
        self._accumulator.fast_path_loss_limit = -math.inf
        self._on_fast_path = False

    def _try_enter(self) -> bool:
        """Enter `optimizer.step`, called without a closure, on the fast path; return whether that was enough."""
        begin = perf_counter()
        accumulator = self._accumulator
        loss: Any = accumulator.totals.loss
        self._clip = None
        if (
            type(loss) is not float
            or not loss <= accumulator.fast_path_loss_limit
            or loss - loss != 0.0  # minus infinity
            or get_ident() != accumulator.thread
            or (self._clipped and not self._clips_calmly())
        ):
            return False
        if self._checks_norm and self._clip is None and not self._is_norm_usual():
            return False
        if begin >= self._note_at:
            self._note(begin)
        self._on_fast_path, self._loss = True, loss
        self._entered_at = entered = perf_counter()
        self._stretch_own += entered - begin
        return True

    def _is_norm_usual(self) -> bool:
        """Whether the gradient norm is not odd, as far as the compiled kernel can tell. After an odd one the present
        step is sampled in full."""
        begin = perf_counter()
        found = measure_in_one_pass([parameter.grad for parameter in self.layers.plain])
        self._stretch_norms += perf_counter() - begin
        if found is None:
            return True
        if found.total <= self._outlier_watch.norm_limit:
            self._last_norm = self.seq, found.total
            return True
        self._governor.follow_outlier(self.seq if not self.layers.stream else None, 1)
        return False

    def _clips_calmly(self) -> bool:
        """Whether the norm that the loop computed is known, and neither odd nor infinite."""
        for norm, _, by in self._clipping.calls.values():
            if norm is not None and not (type(norm) is float and norm <= self._outlier_watch.norm_limit):
                return False
            if not is_finite(by):
                return False
        self._clip, self._clipped = self._clipping.take(), False
        return True

    def _try_exit(self) -> bool:
        """End the same step on the fast path; return whether that was enough. It is not where a hook of the user's or
        another thread did something meanwhile: a backward pass, a logged number, an order."""
        left = perf_counter()
        accumulator, layers, seq, loss = self._accumulator, self.layers, self.seq, self._loss
        if accumulator.totals.loss is not loss or accumulator.fast_path_loss_limit == -math.inf:
            return False
        values = {"loss": loss}
        if left >= self.probes.glance_at and self.probes.glance(left, values):
            return False
        if self._clip is not None:
            (norm, values["clip_limit"], _), self._clip = self._clip, None
            if norm is not None:
                values["grad_norm"] = float(norm)
        if accumulator.totals.batch is not None:
            values.update(accumulator.totals.batch)
        self._losses.append(loss)
        accumulator.end_fast_step(left - self._entered_at)
        record = Record(layers.stream, seq, time.time(), layers.table, values)
        if len(self._queued) < QUEUE_STEPS:
            self._append(record)
        else:
            self._submit(record, False)
        self._on_fast_path = False
        seconds = left - self._previous_exit  # type: ignore[operator] # never None in a stretch
        if seq + 1 >= self._stretch_end or seconds > self._governor.slow_seconds:
            accumulator.fast_path_loss_limit = -math.inf
        self._stretch_steps += 1
        self._stretch_seconds += seconds
        self._previous_exit, self.seq = left, seq + 1
        if self.collector is not None:
            self.collector.end_step(seq, first=True)
        self._stretch_own += perf_counter() - left
        return True

    def _account_stretch(self) -> None:
        if self._stretch_steps:
            own, norms = self._stretch_own, self._stretch_norms
            self._governor.account(self._stretch_steps, self._stretch_seconds, own, norms)
            self._own_since_timed_exit += own
            self._stretch_steps, self._stretch_seconds, self._stretch_own, self._stretch_norms = 0, 0.0, 0.0, 0.0

    def _note(self, now: float) -> None:
        if now >= self._note_at:
            self._note_at = now + NOTE_SECONDS
            self._accumulator.loop_locator.note(sys._getframe())

    def _count_step(self, *, skipped: bool = False, captured: bool = False) -> None:
        """Advance to the next step."""
        seq, self.seq = self.seq, self.seq + 1
        if self.collector is not None:
            self.collector.end_step(seq, first=not self.layers.stream)
        if self.guard is not None and not captured:  # a snapshot waits for the device, which would abort the capture
            self._call_guard(self.guard.exit_step, seq, skipped=skipped)
