"""What share of our time on the host a GPU felt.

A loop launches work ahead of its device. While the device is behind, what our hooks take on the host delays nothing,
and a launch that waits for room in the queue only looks dear: on an H200, 8 % of a step by the host's clock were 0.4 %
of the wall time. So two events on the loop's stream go around our work: what passes on the device between them is what
our work has it do. That counts in place of the host's time where the device is still behind when the next backward pass
begins. Where it is not, it may have waited for the host since, and each second of ours has held it up: then the host's
time counts. Events are read some steps later, and nothing waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from sentinel.hooks.core import fault_guard

MOST_AWAITED = 8
"""Steps whose events are not read yet; the next ones are not measured."""
LEAST_SHARE = 0.1
"""Not less is believed: a bound on what a mistake here can cost."""
_NEWEST = 0.25
"""Weight of the newest measurement in a running mean."""


class DeviceEvent(Protocol):
    """`torch.cuda.Event(enable_timing=True)`."""

    def record(self, stream: Any) -> None:
        """Have the device note when it comes here."""

    def query(self) -> bool:
        """Whether it has."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to that one; both are over."""


class _Measured:
    """A step that the device has still to come to."""

    def __init__(self, tier: int, host_seconds: float, marks: list[DeviceEvent]) -> None:
        self.tier, self.host_seconds = tier, host_seconds
        self.marks = marks
        """Begin, end, begin, end of our work."""
        self.behind = False
        """Whether the device had not come to its end when the next backward pass began."""


class DeviceClock:
    """Of one optimizer, whose parameters are on one device. On the thread that trains, and never while its stream
    records a graph."""

    def __init__(self, find_stream: Callable[[], Any], make_event: Callable[[], DeviceEvent]) -> None:
        self._find_stream, self._make_event = find_stream, make_event
        self._shares: dict[int, float] = {}
        """By what was sampled in a step: its highest tier."""
        self._marks: list[DeviceEvent] = []
        """Of the present step."""
        self._awaited = deque[_Measured]()
        self._unchecked: _Measured | None = None
        """The last step, until the next backward pass begins."""
        self._free: list[DeviceEvent] = []
        self._broken = False

    def begin_step(self) -> None:
        """A step's first work of ours comes."""
        with self._giving_up():
            while self._awaited and self._awaited[0].marks[-1].query():
                self._read(self._awaited.popleft())
        self._free += self._marks
        self._marks = []
        self.mark()

    def mark(self) -> None:
        """Work of ours begins here, or ends."""
        if not self._broken and len(self._awaited) < MOST_AWAITED:
            with self._giving_up():
                event = self._free.pop() if self._free else self._make_event()
                event.record(self._find_stream())
                self._marks.append(event)

    def end_step(self, tier: int, host_seconds: float) -> float:
        """The last mark of the step was set: what share the device feels of `host_seconds`, which are all of ours, as
        far as is known. `tier`: the highest that was sampled."""
        if self._marks and len(self._marks) % 2 == 0 and host_seconds > 0.0:
            self._unchecked = _Measured(tier, host_seconds, self._marks)
            self._awaited.append(self._unchecked)
            self._marks = []
        return self._shares.get(tier, 1.0)

    def begin_backward(self) -> None:
        """A backward pass begins; the first after a step tells whether the device is behind."""
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
        """What fails once is not tried again: the host's time is the cost then."""
        try:
            yield
        except RuntimeError:
            self._broken = True
            self._shares.clear()
            self._awaited.clear()
            fault_guard.swallow("the clock of the GPU", "with the time on the host as the cost of the statistics")


def make_device_clock(parameters: list[torch.Tensor]) -> DeviceClock | None:
    """For an optimizer of these parameters; None where they are not on one CUDA device that is there: fake tensors are
    on none."""
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or not parameters[0].is_cuda or not torch.cuda.is_available():
        return None
    device = parameters[0].device
    return DeviceClock(
        lambda: torch.cuda.current_stream(device),
        lambda: torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
    )
