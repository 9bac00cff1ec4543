"""The monitor of one optimizer: its steps are counted, its probes called, and their measurements queued.

    pre-hook       rollback may act (it is first), then the probes sample the gradients
    optimizer.step
    post-hook      the rest is measured and queued, then rollback may act (it is last)
    GradScaler.step withheld the step: the hooks did not run, and its end does what they would have done

The optimizer's hooks own this object and nothing else does, so that it dies with the optimizer.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from sentinel.hooks.core.device_clock import DeviceClock, make_device_clock
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.loop.forward_passes import ORIGIN
from sentinel.hooks.loop.grad_clipping import read_overflow, scale_left
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.measure.probe import Probes, Step
from sentinel.hooks.step.fast_path import FastPath, MonitorSession
from sentinel.hooks.torch_interop import internals, tensors
from sentinel.hooks.torch_interop.internals import backward_pass_id, exclude_from_tracing
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import Scalar, scalar
from sentinel.hooks.transport import records
from sentinel.hooks.transport.records import Transfers

if TYPE_CHECKING:
    from sentinel.hooks.step.optimizer_in_backward import BackwardGathering

GRADIENTS = "gradients, and what is computed of them"
"""What is not seen where sampling gradients fails, as reported to the user."""


class OptimizerMonitor(FastPath):
    """Watches one optimizer: counts its steps, calls its probes, and queues what they measure."""

    def __init__(
        self,
        session: MonitorSession,
        optimizer: Any,
        layers: Layers,
        probes: Probes,
        *,
        own_scale: Callable[[], Scalar | None] | None = None,
    ) -> None:
        """`own_scale` returns the loss scale of an optimizer that needs no GradScaler."""
        super().__init__(session, optimizer, layers, probes)
        self.loss_seen = False
        self.left_out: dict[str, str] = {}
        """Layer -> reason why its gradients cannot be measured."""
        self._transfers = Transfers()
        self._step: Step | None = None
        self._deferred = self._entered = False
        self._sampling = True
        """Whether gradients are sampled: no longer after an internal fault there."""
        self._timed_exit: float | None = None
        """Time of the exit of the last step whose times were taken."""
        self._own_seconds = self._layers_seconds = 0.0
        self.device_clock: DeviceClock | None = None
        """Set at the first step, where the parameters are on a GPU."""
        self._seeks_device = True
        self._scaler: GradScaler | None = None
        self._scale: Scalar | None = None
        self._own_scale = own_scale

    def hook(self, handles: list[RemovableHandle]) -> None:
        """Register the hooks on the optimizer, and add the handle of each to `handles` before the next, which may fail.

        They are hidden from torch.compile, which would trace into them.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        handles.append(optimizer.register_step_pre_hook(exclude_from_tracing(BeforeStep(self))))
        handles.append(optimizer.register_step_post_hook(exclude_from_tracing(AfterStep(self))))

    def enter_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the start of `optimizer.step(*args, **kwargs)`."""
        if self._dead:
            return
        if self._inside and internals.depth(self._optimizer()) > 1:
            self._inside += 1
            return
        within = self.within
        if within is not None and (backward_pass_id() != -1 or within.whole is not None):
            self._step_within(within)
            return
        self._inside = 1
        if self.guard is not None and not tensors.is_capturing():
            self._call_guard(self.guard.enter_step, self.seq)
        try:
            closure = args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None
            if closure is None and self._try_enter():
                return
            self._enter_full_step(closure if closure is None or callable(closure) else None)
        except Exception:
            self._step = None
            self._broke()

    def exit_step(self) -> None:
        """Handle the end of `optimizer.step`."""
        if self._inside != 1:
            self._inside = max(self._inside - 1, 0)
            return
        try:
            if not self._dead:
                self._end_and_count(self._end_step)
        finally:
            self._inside = 0

    # Called by the patches.

    def loss_scaled(self, scaler: GradScaler) -> None:
        """Note that a loss was scaled."""
        self._scaler = scaler
        # No more than this: another thread's loss may come during a step.
        self._accumulator.fast_path_loss_limit = -math.inf

    def gradients_clipped(self, parameters: list[torch.Tensor], limit: float, norm: torch.Tensor, *, l2: bool) -> None:
        """Note that the loop clipped these gradients, of norm `norm` until then. `l2`: it is an L2 norm."""
        if tensors.is_capturing():
            return
        scale = scale_left(self._scaler, self._optimizer())
        totals = self._accumulator.totals
        totals.clipped_scaled |= scale is not None
        self._clipping.record_clipping(parameters, limit, norm, l2=l2, scale=scale, passes=totals.backwards)
        self._clipped = True

    def start_over(self) -> None:
        """Note that the loop discarded this step's gradients so far."""
        self._clipping.start_over()
        self._clipped = False

    def scaler_enters(self, scaler: GradScaler) -> None:
        """Handle the start of `scaler.step(optimizer)`."""
        scale = scaler._scale
        self._scale = scalar(scale) if scale is not None and not tensors.is_capturing() else None
        self._entered = False
        self._end_stretch()

    def scaler_exits(self) -> None:
        """Handle the end of `scaler.step(optimizer)`; if the step was withheld, no hook ran, and this is its exit."""
        if not self._entered and not self._dead:
            self._end_and_count(self._end_withheld_step)
        self._scale = None

    def scaler_raised(self) -> None:
        """Note that `scaler.step(optimizer)` raised: the scale belongs to no step."""
        self._scale = None

    def loss_not_scaled(self) -> None:
        """Handle a backward pass from a loss that was not scaled: another optimizer's gradients may be."""
        self._scaler = None

    # Optimizers that step inside the backward pass.

    def _step_within(self, within: BackwardGathering) -> None:
        self._end_stretch()
        if tensors.is_capturing():
            self._safely(self._accumulator.capture)
            within.captured = True
        else:
            self._safely(within.enter_part, self)

    def sample_part(self, seq: int, *, norms: bool, layers: bool) -> Step:
        """Sample what this optimizer is about to apply, as its part of step `seq`; return that step."""
        step = Step(seq, self._optimizer(), self._accumulator.totals)
        if norms:
            with torch.no_grad():
                step.gradients = Gradients(self.layers)
                self.probes.before(step, 1)
                if layers:
                    step.thorough = True
                    self.probes.before(step, 2)
        step.release()
        return step

    # The ends of a step.

    def _enter_full_step(self, closure: object) -> None:
        begin = time.perf_counter()
        self._entered, self._clip = True, None
        self._end_stretch()
        if begin >= self._note_at:
            self._note(begin)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if tensors.is_capturing():
            self._accumulator.capture()
            return
        if self._seeks_device:
            self._seeks_device = False
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.device_clock = make_device_clock(parameters)
        if self.device_clock is not None:
            self.device_clock.begin_step()
        # With a closure the backward pass runs inside the step: until then only the last step's gradients are there.
        self._deferred = closure is not None
        clip = None
        if not self._deferred:
            clip = self._clipping.take()
            self._outlier_watch.judge_loss(self._accumulator.totals.loss, self.seq)
        self._step = step = self._make_step(optimizer, read_overflow(optimizer))
        step.clip = clip
        if self._governor.take_rare_turn(step.seq, first=not self.layers.stream):
            self._shield(self._enter_tier_3, step)
        if not self._deferred:
            self._sample_due_tiers(step, loss_judged=True)
            self._trace_nonfinite(step)
        else:
            step.passes_before = step.totals.passes_seconds
        step.release()
        if self.device_clock is not None:
            self.device_clock.mark()
        step.entered = time.perf_counter()
        self._own_seconds = step.entered - begin

    def _enter_tier_3(self, step: Step) -> None:
        begin = time.perf_counter()
        step.rare = True
        with torch.no_grad():
            self.layers.refresh(step.optimizer)
            self.probes.enter(step)
        self._governor.record_sample(3, time.perf_counter() - begin)

    def _end_and_count(self, end: Callable[[], None]) -> None:
        """End a step. It is counted even if `end` fails."""
        seq = self.seq
        try:
            end()
        except Exception:
            self._broke()
        finally:
            if self.seq == seq and not self._dead:
                self._step = None
                self._end_stretch()
                self._accumulator.take()
                self._count_step()

    def _end_step(self) -> None:
        if not (self._on_fast_path and self._try_exit()):
            self._end_full_step()
        elif self.guard is not None:
            self._call_guard(self.guard.exit_step, self.seq - 1, skipped=False)

    def _end_full_step(self) -> None:
        step, self._step = self._step, None
        if self._on_fast_path:
            step = self._reopen_off_fast_path()
        if step is None:  # inside a graph capture: counted, and not seen; or its entry failed
            if self._accumulator.captured:
                self._begin_next_step(skipped=False, captured=True)
            return
        step.left = time.perf_counter()
        if self.device_clock is not None:
            self.device_clock.mark()
        step.reclaim(self._optimizer())
        if self._deferred:
            self._sample_due_tiers(step)
            self._trace_nonfinite(step, exact=False)
        self._measure_and_queue(step)
        self._recover()

    def _reopen_off_fast_path(self) -> Step:
        """Open the step that is over again, off the fast path: more happened in it than expected at its entry."""
        self._end_stretch()
        self._deferred = False
        step = self._make_step(self._optimizer(), 0.0)
        step.clip, step.entered, self._own_seconds = self._clip, self._entered_at, 0.0
        self._outlier_watch.judge_loss(self._loss, step.seq)
        self.probes.before(step, 0)
        return step

    def _end_withheld_step(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            step = self._make_step(optimizer, 1.0)
            step.entered = step.left = time.perf_counter()
            self._own_seconds = 0.0
            if self.device_clock is not None:
                self.device_clock.begin_step()
            self._sample_due_tiers(step)
            self._trace_nonfinite(step, withheld=True)
            self._measure_and_queue(step)

    def _trace_nonfinite(self, step: Step, *, withheld: bool = False, exact: bool = True) -> None:
        """Find the origin of a NaN or infinity, if the step has one."""
        if self.collector is not None:
            self._guard_collector(lambda collector: collector.look(step, withheld=withheld, exact=exact))

    def _guard_collector(self, call: Callable[[EvidenceCollector], None]) -> None:
        assert self.collector is not None
        try:
            call(self.collector)
        except Exception:
            if self._unseen.record_failure(ORIGIN, "tracing what is not finite", "without knowing what made it"):
                self.collector = None

    def _make_step(self, optimizer: Any, skipped: Scalar) -> Step:
        return Step(
            self.seq,
            optimizer,
            self._accumulator.totals,
            skipped=skipped,
            scale=self._scale if self._scale is not None or self._own_scale is None else self._own_scale(),
            previous_exit=self._timed_exit,
            parameters=self.layers,
        )

    def _sample_due_tiers(self, step: Step, *, loss_judged: bool = False) -> None:
        """Sample what is due, the gradients being complete. `loss_judged`: the loss was checked already."""
        if step.clip is None:
            step.clip = self._clipping.take()
        if not loss_judged:
            self._outlier_watch.judge_loss(step.totals.loss, step.seq)
        if step.clip is not None:
            self._outlier_watch.judge_norm(step.clip.norm, step.seq)
        # A withheld step is sampled in full: the user wants to know which layers overflowed.
        first = not self.layers.stream
        every_layer = self._governor.due(2, step.seq, first=first) or step.rare or step.is_withheld
        self.probes.before(step, 0)
        if every_layer or self._governor.due(1, step.seq, first=first):
            self._shield(self._sample, step, every_layer)
            step.gradients_missing = every_layer and step.gradients is None

    def _shield(self, sample: Callable[..., None], step: Step, *arguments: bool) -> None:
        """Sample gradients or weights, unless a fault or a pause prevents it."""
        unseen = self._unseen
        if not self._sampling:
            return
        if unseen.pausing and unseen.is_paused(GRADIENTS):
            unseen.skip()
            return
        try:
            sample(step, *arguments)
        except Exception:
            step.gradients, step.thorough, step.rare = None, False, False
            self._sampling = not unseen.record_failure(GRADIENTS, "the statistics of gradients", "without them")
        else:
            if unseen.pausing:
                unseen.restore(GRADIENTS)

    def _sample(self, step: Step, every_layer: bool) -> None:
        begin = time.perf_counter()
        scale = getattr(step.optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        with torch.no_grad():
            self.layers.refresh(step.optimizer, step.seq)
            step.gradients = Gradients(self.layers, scale if isinstance(scale, torch.Tensor) else None)
            self.probes.before(step, 1)
            judged = step.clip is not None and step.clip.norm is not None
            odd = not judged and self._outlier_watch.judge_norm(step.values.get("grad_norm"), step.seq)
            between = time.perf_counter()
            if every_layer or odd:
                step.thorough = True
                self.probes.before(step, 2)
            self._layers_seconds = time.perf_counter() - between
            if step.rare:
                self._call_tier_3(self.probes.before, step)
        self._governor.record_sample(1, between - begin)
        self.left_out.update(step.gradients.left_out)

    def _measure_after_update(self, step: Step) -> None:
        if step.gradients is not None:
            self.probes.after(step, 1)
        if step.gradients_missing:
            self.probes.after(step, 2)
        elif step.thorough:
            begin = time.perf_counter()
            self.probes.after(step, 2)
            self._governor.record_sample(2, self._layers_seconds + time.perf_counter() - begin)
            if step.rare:
                self._call_tier_3(self.probes.after, step)

    def _call_tier_3(self, call: Callable[[Step, int], None], step: Step) -> None:
        begin = time.perf_counter()
        call(step, 3)
        self._governor.record_sample(3, time.perf_counter() - begin)

    def _measure_and_queue(self, step: Step) -> None:
        """Finish a step that is over: measure the rest, queue it, go on to the next."""
        whole = (
            not self.is_only_optimizer
            or self.probes.awake
            or step.gradients is not None
            or self._governor.due(0, step.seq, first=not self.layers.stream)
            or not self._accumulator.is_training_thread()  # the thread that takes the totals becomes it
        )
        step.totals = self._accumulator.take() if whole else self._accumulator.totals
        if not self.is_only_optimizer:
            self._accumulator.record_owner(self.layers.stream, step.totals)
        self.probes.after(step, 0)
        if whole:
            self._call_relaxed_probes(step)
        else:
            self._accumulator.end_fast_step(step.optimizer_seconds)
            step.totals.logged = {}
        if step.gradients is not None or step.gradients_missing:
            with torch.no_grad():
                self._measure_after_update(step)
        self.probes.end_step(step)
        self.loss_seen = self.loss_seen or "loss" in step.values
        skipped = step.is_withheld
        news = self._outlier_watch.end_step(step.seq, step.values, skipped=skipped)
        record = records.record(step, self.layers, time.time(), self._transfers, self._unseen)
        self._outlier_watch.add_record(record)
        on_device = record.transfer is not None and record.transfer.brings("loss")
        if on_device and not skipped and self.collector is not None:  # a step that is withheld breaks no weight
            self._guard_collector(lambda collector: collector.hold_batch(record.seq, lambda: record.peek("loss")))
        self._submit(record, news or step.urgent)
        self._account_step(step)
        self._begin_next_step(skipped=skipped)

    def report_logged(self) -> None:
        """Report what was logged since the last step with that step, as no other comes. On the training thread."""
        self._safely(self._submit_logged)

    def _submit_logged(self) -> None:
        logged = self._accumulator.totals.logged
        if logged and self.seq:
            step = Step(self.seq - 1, None, StepTotals(), values=logged)
            self._submit(records.record(step, self.layers, time.time(), self._transfers, self._unseen), True)

    def _call_relaxed_probes(self, step: Step) -> None:
        begin = time.perf_counter()
        step.own_seconds = self._own_since_timed_exit + self._own_seconds
        self._own_since_timed_exit = -self._own_seconds  # already counted here, and `_account_step` adds them again
        self.probes.call_relaxed_probes(step)
        if not self.layers.stream and (mark := self._governor.mark_opening(step.seq)) is not None:
            step.values["opening_step"] = mark
        self._timed_exit = step.left
        self._governor.record_sample(0, time.perf_counter() - begin)

    def _account_step(self, step: Step) -> None:
        self._own_seconds += time.perf_counter() - step.left
        self._own_since_timed_exit += self._own_seconds
        share = 1.0
        if self.device_clock is not None:
            tier = 3 if step.rare else 2 if step.thorough else 1 if step.gradients is not None else 0
            self.device_clock.mark()
            share = self.device_clock.end_step(tier, self._own_seconds)
        if self.layers.stream:
            self._governor.aside(self._own_seconds, share)
        elif self._previous_exit is None:
            self._governor.record_first_step(self._own_seconds)
        else:
            self._account_stretch()
            self._governor.record_step(self.seq, step.left - self._previous_exit, self._own_seconds, share)
        self._previous_exit = step.left

    def _begin_next_step(self, *, skipped: bool, captured: bool = False) -> None:
        plain = self._scaler is None and self._own_scale is None and not captured
        self._scaler = None
        self._count_step(skipped=skipped, captured=captured)
        if plain:  # else a step may be withheld
            self._begin_stretch()


class StepHook:
    """A hook of the optimizer. It owns the optimizer monitor."""

    def __init__(self, monitor: OptimizerMonitor) -> None:
        self.monitor = monitor

    def __reduce__(self) -> tuple[Any, ...]:
        # An optimizer may copy and pickle all its attributes. The copy is not the run's: its hook does nothing.
        return functools.partial, (sys.audit, "sentinel.copied_hook")


class BeforeStep(StepHook):
    """The hook before a step."""

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.monitor.enter_step(args, kwargs)


class AfterStep(StepHook):
    """The hook after a step."""

    def __call__(self, *_: Any) -> None:
        self.monitor.exit_step()
