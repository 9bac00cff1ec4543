"""A cheap check of loss and norm on the training thread, so that the very step that looks odd is sampled in full.

The daemon judges, but it receives a step up to a second later: too late to sample the first odd step, and a diagnosis
needs to know which layers changed there. A false outlier costs a few samples and raises no alert.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from sentinel.hooks.core.governor import NONFINITE_STEPS, Governor
from sentinel.hooks.torch_interop.tensors import Scalar, is_finite
from sentinel.hooks.transport.records import Record

NOISE = 8.0
"""Mean absolute deviations above the running mean from which a loss is odd. Single hard batches may exceed it."""
LEAST = 0.01
"""Share of the mean by which a loss may always exceed it: of a loss without noise, the last bit would be odd."""
LEAP = 5.0
"""Multiple of the running mean from which a gradient norm is odd: half of what the rule GradientSpike asks for."""
SPAN = 50
"""Number of samples that the running mean covers."""
ODD_STEPS = 4
"""Steps that are sampled in full: after them, the daemon has asked for more if there is more to see."""
BEHIND = 64
"""Most steps that a device may be behind for its losses to be checked."""
LARGEST = sys.float_info.max
"""The largest finite float."""
_FINITE_SIGNALS = ("loss", "grad_norm", "grad_norm_applied")
"""Signals that are finite in a healthy run."""


class LossOutliers:
    """Running mean and mean absolute deviation of the loss. An outlier moves them as the largest normal value would."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._count = 0

    @property
    def limit(self) -> float:
        """The highest loss that is not odd, judged by the losses so far."""
        if self._count < SPAN:
            return LARGEST
        return min(self._mean + max(NOISE * self._deviation, LEAST * abs(self._mean)), LARGEST)

    def observe(self, loss: float) -> bool:
        """Add a finite loss; return whether it is above the noise of those before it. False for the first `SPAN`."""
        self._count += 1
        if self._count == 1:
            self._mean = loss
        step, odd, weight = loss - self._mean, False, 1.0 / SPAN
        if self._count <= SPAN:
            weight = 1.0 / self._count
        elif step > NOISE * self._deviation and step > (limit := LEAST * abs(self._mean)):
            step, odd = max(NOISE * self._deviation, limit), True
        self._mean += weight * step
        self._deviation += weight * (abs(step) - self._deviation)
        return odd


class NormOutliers:
    """Running mean of the gradient norm. An outlier moves it as the largest normal value would."""

    def __init__(self) -> None:
        self._mean, self._count = 0.0, 0

    @property
    def limit(self) -> float:
        """The highest norm that is not odd, judged by the norms so far."""
        return LEAP * self._mean if self._count >= SPAN else LARGEST

    def observe(self, norm: float) -> bool:
        """Add a norm; return whether it is far above those before it. False for the first `SPAN`, and for a non-finite
        norm, which is judged with the loss. A norm of 0 comes from a step without a gradient, and is ignored."""
        if not 0.0 < norm < math.inf:
            return False
        odd = norm > (limit := self.limit)
        self._count += 1
        self._mean += (min(norm, limit) - self._mean) / min(self._count, SPAN)
        return odd


class LateValues:
    """Records whose value was still on a device when the step ended. Nothing waits for them."""

    def __init__(self, name: str) -> None:
        """`name`: the signal's name."""
        self._name = name
        self.records: deque[Record] = deque(maxlen=BEHIND)

    def add(self, record: Record) -> None:
        """Keep the record of a step that is over if its value is still to come."""
        if record.transfer is not None and record.transfer.brings(self._name):
            self.records.append(record)

    def take_arrived(self) -> Iterator[float]:
        """Yield the values that have arrived since, in the order of their steps."""
        while self.records and (value := self.records[0].peek(self._name)) is not None:
            self.records.popleft()
            yield value


class OutlierWatch:
    """Judges the loss and the gradient norm of each step. After an odd one, everything is sampled for some steps, as
    far as the governor allows; after an odd or non-finite loss, also no snapshot is kept of a state that may be broken,
    and the sender is woken."""

    def __init__(self, governor: Governor, warn: weakref.WeakMethod[Callable[[], None]], *, first: bool = True) -> None:
        """`warn` notifies the owner, which keeps snapshots. Held weakly: the owner holds this object, and must die with
        the optimizer. `first`: whether this is the first optimizer, whose steps the governor counts."""
        self._losses, self._governor, self._warn, self._first = LossOutliers(), governor, warn, first
        self._norms = NormOutliers()
        self._late_losses, self._late_norms = LateValues("loss"), LateValues("grad_norm")
        self._nonfinite_before = self._outlier_now = self._outlier_before = False
        self.unjudged: list[float] = []
        """Losses within the limit, of the steps since the last call of `judge_loss`."""

    @property
    def loss_limit(self) -> float:
        """The highest loss that is not odd."""
        return self._losses.limit

    @property
    def norm_limit(self) -> float:
        """The highest gradient norm that is not sampled in full as odd."""
        return self._norms.limit if self._governor.follows_outliers else LARGEST

    def judge_norm(self, norm: Scalar | None, seq: int) -> bool:
        """Judge the gradient norm of step `seq`; return whether it, or one that arrived late, is odd. A norm on a
        device is not read now. Unlike an odd loss, an odd norm does not prevent a snapshot."""
        odd = [self._norms.observe(late) for late in self._late_norms.take_arrived()]
        if isinstance(norm, float):
            odd.append(self._norms.observe(norm))
        return any(odd) and self._governor.follow_outlier(seq if self._first else None, ODD_STEPS)

    def judge_loss(self, loss: Scalar | None, seq: int) -> None:
        """Judge the loss of step `seq`, and earlier ones that arrived late. A loss on a device is not read now."""
        if self.unjudged:
            for known in self.unjudged:  # within the limit when the stretch began: against those since, one may be odd
                self._judge(known, seq)
            self.unjudged.clear()
        if self._late_losses.records:
            for late in self._late_losses.take_arrived():
                self._judge(late, seq)
        if isinstance(loss, float):
            self._judge(loss, seq)

    def forget(self) -> None:
        """Forget earlier losses and norms, and those still on a device: the ones to come are not comparable."""
        self._losses = LossOutliers()
        self.unjudged.clear()
        self._late_losses.records.clear()
        self._norms = NormOutliers()
        self._late_norms.records.clear()

    def add_record(self, record: Record) -> None:
        """Add the record of a step that is over, for its loss and norm if they come late."""
        self._late_losses.add(record)
        self._late_norms.add(record)

    def _judge(self, loss: float, seq: int) -> None:
        if not math.isfinite(loss):
            self._respond(seq, NONFINITE_STEPS)
        elif self._losses.observe(loss):
            self._respond(seq, ODD_STEPS)

    def end_step(self, seq: int, values: Mapping[str, Scalar], *, skipped: bool) -> bool:
        """Judge a step that is over; return whether the sender must be woken. Only the first odd step in a row does
        it: in a run that is broken every step would."""
        nonfinite = not skipped and _has_nonfinite(values)
        if nonfinite:
            self._respond(seq + 1, NONFINITE_STEPS)
        news = (nonfinite and not self._nonfinite_before) or (self._outlier_now and not self._outlier_before)
        self._nonfinite_before, self._outlier_before, self._outlier_now = nonfinite, self._outlier_now, False
        return news

    def _respond(self, seq: int, steps: int) -> None:
        self._outlier_now = True
        self._governor.follow_outlier(seq if self._first else None, steps)
        warn = self._warn()
        if warn is not None:
            warn()


def _has_nonfinite(values: Mapping[str, Scalar]) -> bool:
    for name in _FINITE_SIGNALS:  # noqa: SIM110 (at every step: a generator costs twice the time)
        if name in values and not is_finite(values[name]):
            return True
    return False
