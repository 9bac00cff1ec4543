"""Passes on what the patches see of one run: to its accumulator, monitors, batches and collector.

The monitors of a run are held weakly: they die with their optimizers, whose hooks own them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import GradScaler

from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.loop import losses, patches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.session.backward_passes import PassFilter, Succession
from sentinel.hooks.step.optimizer_in_backward import BackwardGathering
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.torch_interop.tensors import Scalar, is_capturing, is_finite

if TYPE_CHECKING:
    from sentinel.hooks.session.session import RunSession


class EventRouter:
    """The `LoopEvents` of one run. Called several times at every step: its cost is measurable."""

    def __init__(
        self,
        session: RunSession,
        monitors: OptimizerMonitors,
        collector: EvidenceCollector,
        succession: Succession,
    ) -> None:
        self.accumulator, self.batches = session.accumulator, session.batches
        self._session, self._monitors, self._collector, self._succession = session, monitors, collector, succession
        self._scales = self._looked_at = False
        """Whether a loss of this run was scaled; whether a probe looks at the present backward pass."""
        every = monitors.all_monitors
        self._pass_filter = PassFilter(every[0].layers) if len(every) == 1 else None
        """None where several optimizers share the passes: gradients that one clears, another may need."""
        self._may_be_ours = True
        """Whether the present pass may be this run's: the model ran since its last step, or is never seen to run."""
        self._trains_here = False
        """Whether a pass of the model was seen on the training thread: then a thread that did not run the model has
        passes of other models only."""
        self._steps: list[tuple[StepAccumulator, int]] = []
        """The other runs of this process, with the number of their steps at the end of the last pass."""

    def expect_trial_passes(self) -> None:
        """Treat passes before the first step whose gradients are cleared again as trials."""
        if self._pass_filter is not None:
            self._pass_filter.expects_trials = True

    def model_ran(self) -> bool:
        return self.accumulator.totals.forwards > 0 and self.accumulator.is_training_thread()

    def _is_elsewhere(self) -> bool:
        return self._trains_here and not self.accumulator.may_train_here()

    def backward_begins(self, roots: object, *, weighted: bool) -> None:
        if self._is_elsewhere():
            return
        accumulator = self.accumulator
        accumulator.totals.weighted |= weighted
        accumulator.sees_forwards = accumulator.sees_forwards or accumulator.totals.forwards > 0
        ran = self.model_ran()
        self._trains_here |= ran
        self._may_be_ours = not accumulator.sees_forwards or ran
        if self._pass_filter is not None:
            stepped = [other for other, steps in self._steps if other.steps > steps]
            first = not accumulator.totals.backwards
            if self._pass_filter.begins(first=first, others_stepped=bool(stepped)):
                self._start_over()
                for other in stepped:
                    if accumulator.in_last_pass and other.in_last_pass:
                        accumulator.record_rival()
                        other.record_rival()
        for monitor in self._monitors.active_monitors:
            if monitor.device_clock is not None and not is_capturing():
                monitor.device_clock.begin_backward()
        if self._scales and not losses.is_scaled_pass(roots):
            for monitor in self._monitors.active_monitors:
                monitor.loss_not_scaled()
        self._looked_at = self._monitors.awake
        if self._looked_at:
            for monitor in self._monitors.active_monitors:
                if monitor.probes.awake:
                    monitor.probes.pass_begins(roots)

    def backward_ended(self, loss: Scalar | None, seconds: float) -> None:
        if self._is_elsewhere():
            return
        self.accumulator.in_last_pass = self._pass_filter is None or self._pass_filter.end_pass()
        if not self.accumulator.in_last_pass and not self._may_be_ours:
            loss = None  # the loss of a model that is trained beside this one
        else:
            self.accumulator.backward_ended(loss, seconds)
        self._steps = [(one, one.steps) for one in patches.list_accumulators() if one is not self.accumulator]
        if self._looked_at:
            for monitor in self._monitors.active_monitors:
                if monitor.probes.awake:
                    monitor.probes.pass_ended()
        if not is_finite(loss):
            self._collector.freeze_batch()
        gathering = self._monitors.gathering
        if gathering is not None and gathering.whole is not None:
            gathering.end_pass()
        elif self._may_be_ours and self.accumulator.is_training_thread():
            clearings = self._pass_filter.clearings if self._pass_filter is not None else None
            self._succession.end_pass(self.accumulator.steps, clearings)

    def _start_over(self) -> None:
        """Discard the passes of the present step so far: the loop threw them away and takes the step again."""
        self.accumulator.start_over()
        self._collector.start_over()
        for monitor in self._monitors.active_monitors:
            monitor.start_over()

    def backward_failed(self, error: Exception) -> None:
        self._session.report_failure(error)

    def capturing(self) -> None:
        self._session.prepare_capture()

    def loss_scaled(self, scaler: GradScaler) -> None:
        self._scales = True
        for monitor in self._monitors.active_monitors:
            monitor.loss_scaled(scaler)

    def scaler_enters(self, scaler: GradScaler, optimizer: object) -> None:
        for monitor in self._monitors.active_monitors:
            if monitor.watches(optimizer):
                monitor.scaler_enters(scaler)

    def scaler_exits(self, scaler: GradScaler, optimizer: object) -> None:
        for monitor in self._monitors.active_monitors:
            if monitor.watches(optimizer):
                monitor.scaler_exits()

    def scaler_raised(self, scaler: GradScaler, optimizer: object) -> None:
        for monitor in self._monitors.active_monitors:
            if monitor.watches(optimizer):
                monitor.scaler_raised()

    def gradients_clipped(
        self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor, *, l2: bool
    ) -> None:
        for monitor in self._monitors.active_monitors:
            monitor.gradients_clipped(parameters, max_norm, norm, l2=l2)


class OptimizerMonitors:
    """The monitors of one run whose optimizers are still there. Read on any thread."""

    def __init__(self, monitors: Sequence[OptimizerMonitor] = (), gathering: BackwardGathering | None = None) -> None:
        """`monitors`: one for each optimizer; `gathering` merges them if the optimizers step in the backward pass."""
        self._refs = [weakref.ref(monitor) for monitor in monitors]
        self.gathering = gathering

    @property
    def all_monitors(self) -> list[OptimizerMonitor]:
        """The monitor of each optimizer that still exists."""
        return [monitor for ref in self._refs if (monitor := ref()) is not None]

    @property
    def active_monitors(self) -> list[OptimizerMonitor]:
        """The monitors in use: as `all_monitors`, but one for all optimizers that step inside the backward pass."""
        every = self.all_monitors
        whole = self.gathering.whole if self.gathering is not None else None
        return [whole] if whole is not None and every else every

    @property
    def awake(self) -> bool:
        """Whether a probe may look at this backward pass. Merged monitors still count as long as they live."""
        for ref in self._refs:
            monitor = ref()
            if monitor is not None and monitor.probes.awake:
                return True
        return False
