"""A cheap look at the loss on the training thread, so that the very step that looks odd is sampled in full.

The daemon judges, but it hears of a step up to half a second later: its word comes too late for the first odd step, and
which layers moved there is what a diagnosis wants to know. A wrong suspicion costs a few samples and tells nobody.
"""

from __future__ import annotations

NOISE = 8.0
"""Mean absolute deviations over the running mean. Single hard batches pass it now and then, and may."""
LEAST = 0.01
"""Share of the mean that is never odd: of a loss without noise the last bit would be."""
SPAN = 50
"""Samples that the running mean looks back on."""
ATTENTION = 4
"""Steps that are sampled in full: by then the daemon has asked for more, if it is more."""


class Suspicion:
    """Running mean and mean absolute deviation of the loss. An outlier moves them as the largest normal value would."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._count = 0

    def odd(self, loss: float) -> bool:
        """Whether a finite loss is out of the noise of those before it. Never within the first `SPAN`."""
        self._count += 1
        if self._count == 1:
            self._mean = loss
        step, odd, weight = loss - self._mean, False, 1.0 / SPAN
        if self._count <= SPAN:
            weight = 1.0 / self._count
        elif step > NOISE * self._deviation and step > (reach := LEAST * abs(self._mean)):
            step, odd = max(NOISE * self._deviation, reach), True
        self._mean += weight * step
        self._deviation += weight * (abs(step) - self._deviation)
        return odd
