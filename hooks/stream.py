"""One optimizer, watched: its steps are counted, its probes called, and what they measure is queued.

    pre-hook       rollback may act (it is first), then the probes look at the gradients
    optimizer.step
    post-hook      the rest is measured and queued, then rollback may act (it is last)
    GradScaler.step withheld the step: the hooks did not run, and its end does what they would have done

The optimizer's hooks own this object and nothing else does, so that it dies with the optimizer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_graph_task_id as present_pass
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from sentinel.hooks import fast_path_native, faults, nesting, readout
from sentinel.hooks.clipping import overflowed, scale_left
from sentinel.hooks.companions import Within
from sentinel.hooks.fast_path import FastPath
from sentinel.hooks.gradients import Gradients
from sentinel.hooks.layers import Layers
from sentinel.hooks.pacing import Pacing
from sentinel.hooks.probe import Probes, Step
from sentinel.hooks.readout import Record, Transfers
from sentinel.hooks.step_hooks import Enter, Leave
from sentinel.hooks.tally import Ledger, Scalar, scalar
from sentinel.hooks.untraced import untraced


class Stream(FastPath):
    """One optimizer, watched: counts its steps, calls its probes, and queues what they measure."""

    def __init__(
        self,
        optimizer: Any,
        layers: Layers,
        probes: Probes,
        *,
        ledger: Ledger,
        pacing: Pacing,
        submit: Callable[[Record, bool], None],
        queued: deque[Record],
        own_scale: Callable[[], Scalar | None] | None = None,
    ) -> None:
        """`submit` takes a record, and whether it is urgent. `queued`: those that wait; one that is nothing special may
        be appended, where there is room. `own_scale`: the loss scale of an optimizer that needs no GradScaler."""
        super().__init__(optimizer, layers, probes, ledger=ledger, pacing=pacing, submit=submit, queued=queued)
        self.loss_seen = False
        self.left_out: dict[str, str] = {}
        """Layers whose gradients cannot be measured, and why."""
        self._transfers = Transfers()
        self._step: Step | None = None
        self._deferred = self._entered = False
        self._told_exit: float | None = None
        """Of the last step whose times were taken."""
        self._own_seconds = self._layers_seconds = 0.0
        self._scaler: GradScaler | None = None
        self._scale: Scalar | None = None
        self._own_scale = own_scale

    def hook(self) -> list[RemovableHandle]:
        """Put the hooks on the optimizer. Hidden from torch.compile, which would trace into them."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return [
            optimizer.register_step_pre_hook(untraced(Enter(self))),
            optimizer.register_step_post_hook(untraced(Leave(self))),
        ]

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`optimizer.step(*args, **kwargs)` begins."""
        if self._dead:
            return
        if self._inside and nesting.depth(self._optimizer()) > 1:
            self._inside += 1
            return
        within = self.within
        if within is not None and (present_pass() != -1 or within.whole is not None):
            self._step_within(within)
            return
        self._inside = 1
        if self.guard is not None and not readout.capturing():
            self._guarded("enter_step", self.seq)
        try:
            closure = args[1] if len(args) > 1 else kwargs.get("closure") if kwargs else None
            if closure is None and (fast_path_native.enter(self) or self._try_enter()):
                return
            self._enter(closure if closure is None or callable(closure) else None)
        except Exception:
            self._broke()

    def ends(self) -> None:
        """It is over."""
        if self._inside != 1:
            self._inside = max(self._inside - 1, 0)
            return
        try:
            if self._dead:
                return
            if not (self._on_fast_path and (fast_path_native.leave(self) or self._try_exit())):
                self._leave()
            elif self.guard is not None:
                self._guarded("exit_step", self.seq - 1, skipped=False)
        except Exception:
            self._broke()
        finally:
            self._inside = 0

    # What the patches tell.

    def scaled(self, scaler: GradScaler) -> None:
        """A loss was scaled."""
        self._scaler = scaler
        self._ledger.calm_to = -math.inf  # and no more: another thread's loss may come inside a step

    def clipped(self, parameters: list[torch.Tensor], limit: float, norm: torch.Tensor | None) -> None:
        """The loop clipped these gradients, of L2 norm `norm` till then (None: it went by another norm)."""
        if readout.capturing():
            return
        scale = scale_left(self._scaler, self._optimizer())
        self._ledger.tally.clipped_scaled |= scale is not None
        self._clipping.clipped(parameters, limit, norm, scale)
        self._clipped = True

    def start_over(self) -> None:
        """The loop threw away the gradients of this step so far."""
        self._clipping.start_over()
        self._clipped = False

    def scaler_enters(self, scaler: GradScaler) -> None:
        """`scaler.step(optimizer)` begins."""
        scale = scaler._scale
        self._scale = scalar(scale) if scale is not None and not readout.capturing() else None
        self._entered = False
        self._end_stretch()

    def scaler_exits(self) -> None:
        """`scaler.step(optimizer)` is over. If it withheld the step the hooks did not run, and this is the exit."""
        if not self._entered:
            self._safely(self._withheld)
        self._scale = None

    def scaler_raised(self) -> None:
        """`scaler.step(optimizer)` raised, and the scale is that of no step."""
        self._scale = None

    def unscaled(self) -> None:
        """A backward pass begins from a loss that was not scaled: gradients of another optimizer may be."""
        self._scaler = None

    # Optimizers that step inside the backward pass.

    def _step_within(self, within: Within) -> None:
        self._end_stretch()
        if readout.capturing():
            self._safely(self._ledger.capture)
            within.captured = True
        else:
            self._safely(within.entered, self)

    def part(self, seq: int, *, norms: bool, layers: bool) -> Step:
        """Sample what this optimizer is about to apply, as its part of step `seq`."""
        step = Step(seq, self._optimizer(), self._ledger.tally)
        if norms:
            with torch.no_grad():
                step.gradients = Gradients(self.layers)
                self.probes.before(step, 1)
                if layers:
                    step.thorough = True
                    self.probes.before(step, 2)
        return step

    # The ends of a step.

    def _enter(self, closure: object) -> None:
        begin = time.perf_counter()
        self._entered, self._clip = True, None
        self._end_stretch()
        if begin >= self._note_at:
            self._note(begin)
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if readout.capturing():
            self._ledger.capture()
            return
        # With a closure the backward pass runs inside the step: till then there are only the last step's gradients.
        self._deferred = closure is not None
        clip = None
        if not self._deferred:
            clip = self._clipping.take()
            self._suspicion_response.look_at(self._ledger.tally.loss, self.seq)
        self._step = step = self._open(optimizer, overflowed(optimizer))
        step.clip = clip
        if self._pacing.rare(step.seq):
            self._enter_rarely(step)
        if not self._deferred:
            self._before(step, looked=True)
            self._inquire(step)
        else:
            step.passes_before = step.tally.passes_seconds
        step.entered = time.perf_counter()
        self._own_seconds = step.entered - begin

    def _enter_rarely(self, step: Step) -> None:
        begin = time.perf_counter()
        step.rare = True
        with torch.no_grad():
            self.layers.refresh(step.optimizer)
            self.probes.enter(step)
        self._pacing.sampled(3, time.perf_counter() - begin)

    def _leave(self) -> None:
        step, self._step = self._step, None
        if self._on_fast_path:
            step = self._fall_back()
        if step is None:  # inside a graph that is being captured: counted, and not seen
            self._next(skipped=False, captured=True)
            return
        step.left = time.perf_counter()
        if self._deferred:
            self._before(step)
            self._inquire(step, exact=False)
        self._close(step)

    def _fall_back(self) -> Step:
        """The step that is over began on the fast path, and then more happened than was expected at its entry."""
        self._end_stretch()
        self._deferred = False
        step = self._open(self._optimizer(), 0.0)
        step.clip, step.entered, self._own_seconds = self._clip, self._entered_at, 0.0
        self._suspicion_response.look_at(self._loss, step.seq)
        self.probes.before(step, 0)
        return step

    def _withheld(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            step = self._open(optimizer, 1.0)
            step.entered = step.left = time.perf_counter()
            self._own_seconds = 0.0
            self._before(step)
            self._inquire(step, withheld=True)
            self._close(step)

    def _inquire(self, step: Step, *, withheld: bool = False, exact: bool = True) -> None:
        """Where something is not finite: find out what made it so."""
        if self.inquest is None:
            return
        try:
            self.inquest.look(step, withheld=withheld, exact=exact)
        except Exception:
            self.inquest = None
            faults.swallow("tracing what is not finite", "without knowing who made it")

    def _open(self, optimizer: Any, skipped: Scalar) -> Step:
        return Step(
            self.seq,
            optimizer,
            self._ledger.tally,
            skipped=skipped,
            scale=self._scale if self._scale is not None or self._own_scale is None else self._own_scale(),
            previous_exit=self._told_exit,
            parameters=self.layers,
        )

    def _before(self, step: Step, *, looked: bool = False) -> None:
        """Gradients are complete: sample what is due. `looked`: at the loss, already."""
        if step.clip is None:
            step.clip = self._clipping.take()
        if not looked:
            self._suspicion_response.look_at(step.tally.loss, step.seq)
        # A step that is withheld is looked at whole: which layers overflowed is what one wants to know.
        every_layer = self._pacing.due(2, step.seq) or step.rare or _is_one(step.skipped)
        self.probes.before(step, 0)
        if not every_layer and not self._pacing.due(1, step.seq):
            return
        begin = time.perf_counter()
        scale = getattr(step.optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        with torch.no_grad():
            self.layers.refresh(step.optimizer, step.seq)
            step.gradients = Gradients(self.layers, scale if isinstance(scale, torch.Tensor) else None)
            self.probes.before(step, 1)
            between = time.perf_counter()
            if every_layer:
                step.thorough = True
                self.probes.before(step, 2)
            self._layers_seconds = time.perf_counter() - between
            if step.rare:
                self._rarely(self.probes.before, step)
        self._pacing.sampled(1, between - begin)
        self.left_out.update(step.gradients.left_out)

    def _rarely(self, call: Callable[[Step, int], None], step: Step) -> None:
        begin = time.perf_counter()
        call(step, 3)
        self._pacing.sampled(3, time.perf_counter() - begin)

    def _close(self, step: Step) -> None:
        """The step is over: measure the rest, queue it, go on to the next."""
        whole = not self.alone or self.probes.awake or step.gradients is not None or self._pacing.due(0, step.seq)
        whole = whole or not self._ledger.here()  # the thread that takes the tally is the one that trains
        step.tally = self._ledger.take() if whole else self._ledger.tally
        if not self.alone:
            self._ledger.owned(self.layers.stream, step.tally)
        self.probes.after(step, 0)
        if whole:
            self._relaxed(step)
        else:
            self._ledger.passed(step.optimizer_seconds)
            step.tally.logged = {}
        if step.gradients is not None:
            self.probes.after(step, 1)
        if step.thorough:
            begin = time.perf_counter()
            self.probes.after(step, 2)
            self._pacing.sampled(2, self._layers_seconds + time.perf_counter() - begin)
            if step.rare:
                with torch.no_grad():
                    self._rarely(self.probes.after, step)
        self.probes.passed(step)
        self.loss_seen = self.loss_seen or "loss" in step.values
        skipped = _is_one(step.skipped)
        news = self._suspicion_response.closed(step.seq, step.values, skipped=skipped)
        record = readout.record(step, self.layers, time.time(), self._transfers)
        self._suspicion_response.recorded(record)
        self._submit(record, news)
        self._account(step.left)
        self._next(skipped=skipped)

    def _relaxed(self, step: Step) -> None:
        begin = time.perf_counter()
        self.probes.relaxed(step)
        self._told_exit = step.left
        self._pacing.sampled(0, time.perf_counter() - begin)

    def _account(self, left: float) -> None:
        self._own_seconds += time.perf_counter() - left
        if self.layers.stream:
            self._pacing.aside(self._own_seconds)
        elif self._previous_exit is not None:
            self._account_stretch()
            self._pacing.stepped(self.seq, left - self._previous_exit, self._own_seconds)
        self._previous_exit = left

    def _next(self, *, skipped: bool, captured: bool = False) -> None:
        plain = self._scaler is None and self._own_scale is None and not captured
        self._scaler = None
        self._over(skipped=skipped, captured=captured)
        if plain:  # else a step may be withheld
            self._begin_stretch()


def _is_one(skipped: Scalar) -> bool:
    """Known to be 1 on the host: one that is still on a device is not asked."""
    return isinstance(skipped, float) and skipped == 1.0
