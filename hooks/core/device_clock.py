"""Measures what share of our host time delays a GPU, with CUDA events around our work.

A loop launches work ahead of its device. While the device is behind, time that our hooks take on the host delays
nothing, and a launch that waits for room in the queue only looks expensive: on an H200, 8 % of a step by the host's
clock were 0.4 % of the wall time. So two events on the loop's stream enclose our work: the time between them on the
device is what our work costs it. This counts in place of the host's time where the device is still behind when the next
backward pass begins. Where it is not, it may have waited for the host since, and each second of ours has delayed it:
then the host's time counts. Events are read some steps later, and nothing waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from sentinel.hooks.core import faults

MOST_AWAITED = 8
"""Most steps whose events are not read yet; further steps are not measured."""
LEAST_SHARE = 0.1
"""The smallest share that is believed, which limits what a mistake here can cost."""
_NEWEST = 0.25
"""Weight of the newest measurement in a running mean."""


class DeviceEvent(Protocol):
    """The methods of `torch.cuda.Event(enable_timing=True)` that are used here."""

    def record(self, stream: Any) -> None:
        """Have the device record the time at which it reaches this point of `stream`."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`; the device must have reached both."""


class _Measured:
    """A step whose events the device may not have reached yet."""

    def __init__(self, tier: int, host_seconds: float, marks: list[DeviceEvent]) -> None:
        self.tier, self.host_seconds = tier, host_seconds
        self.marks = marks
        """Events at the start and the end of each part of our work, in turn."""
        self.behind = False
        """Whether the device had not reached the step's last mark when the next backward pass began."""


class DeviceClock:
    """Clock of one optimizer whose parameters are on one device. Used on the training thread, and never while its
    stream captures a graph."""

    def __init__(self, find_stream: Callable[[], Any], make_event: Callable[[], DeviceEvent]) -> None:
        self._find_stream, self._make_event = find_stream, make_event
        self._shares: dict[int, float] = {}
        """Highest tier that was sampled in a step -> running mean of the share that the device feels."""
        self._marks: list[DeviceEvent] = []
        """Events of the present step."""
        self._awaited = deque[_Measured]()
        self._unchecked: _Measured | None = None
        """The last step, until the next backward pass begins."""
        self._free: list[DeviceEvent] = []
        self._broken = False

    def begin_step(self) -> None:
        """Mark the start of our first work in a step, and read earlier steps that the device has finished."""
        with self._giving_up():
            while self._awaited and self._awaited[0].marks[-1].query():
                self._read(self._awaited.popleft())
        self._free += self._marks
        self._marks = []
        self.mark()

    def mark(self) -> None:
        """Mark that work of ours begins or ends here."""
        if not self._broken and len(self._awaited) < MOST_AWAITED:
            with self._giving_up():
                event = self._free.pop() if self._free else self._make_event()
                event.record(self._find_stream())
                self._marks.append(event)

    def end_step(self, tier: int, host_seconds: float) -> float:
        """Return what share the device feels of a step's `host_seconds`, which are all of our time, as far as is known.
        Called after the step's last mark. `tier`: the highest that was sampled."""
        if self._marks and len(self._marks) % 2 == 0 and host_seconds > 0.0:
            self._unchecked = _Measured(tier, host_seconds, self._marks)
            self._awaited.append(self._unchecked)
            self._marks = []
        return self._shares.get(tier, 1.0)

    def begin_backward(self) -> None:
        """Note that a backward pass begins: the first after a step shows whether the device is behind."""
        step, self._unchecked = self._unchecked, None
        if step is not None and not self._broken:
            with self._giving_up():
                step.behind = not step.marks[-1].query()

    def _read(self, step: _Measured) -> None:
        share = 1.0
        if step.behind:
            pairs = zip(step.marks[::2], step.marks[1::2], strict=True)
            felt = sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
            share = min(max(felt / step.host_seconds, LEAST_SHARE), 1.0)
        before = self._shares.get(step.tier, share)
        self._shares[step.tier] = before + _NEWEST * (share - before)
        self._free += step.marks

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Stop measuring after the first failure in the block: from then on the host's time counts as the cost."""
        try:
            yield
        except RuntimeError:
            self._broken = True
            self._shares.clear()
            self._awaited.clear()
            faults.swallow("the clock of the GPU", "with the time on the host as the cost of the statistics")


def make_device_clock(parameters: list[torch.Tensor]) -> DeviceClock | None:
    """Return a clock for an optimizer of these parameters; None where they are not all on one CUDA device that is
    there (fake tensors are on none)."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or not parameters[0].is_cuda or not torch.cuda.is_available():
        return None
    device = parameters[0].device
    return DeviceClock(
        lambda: torch.cuda.current_stream(device),
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
    )
