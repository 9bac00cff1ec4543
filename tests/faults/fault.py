"""A fault that is trained, and its healthy twin: one loop, with the fault or without."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import sentinel
from sentinel.hooks.session import monitor as monitor_module
from tests.hooks.sessions import find_session

CONNECT_SECONDS = 30.0
LATE_STEPS = 2000, 5000
LATE_SECONDS = 5.0
"""An alert may come so long after its fault, at default settings."""
AHEAD_STEPS = 512
"""Steps that may wait for the sender: a loop of a millisecond outruns the daemon, and what it drops is not judged."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the catalogue (docs/detection.md), or one of the ways to get there."""

    id: str
    """The row; `P1 backward` is another way into P1."""
    what: str
    alert: str
    signal: str
    """Whose samples the delay is counted in; `seconds` where it is measured by the clock."""
    delay: int
    """The most of them from the first step at which the fault has an effect to the alert."""
    cause: str
    """A pattern that the diagnosed cause must match. ONSET stands for the step at which the fault begins, NEAR for one
    of the ten from the step before, AROUND for `between steps` of two samples that it lies between."""
    late_cause: str = ""
    """What it must match where values stay on a device and are read some steps later, if not the same."""
    names: tuple[str, ...] = ()
    """Patterns of what the case must say besides."""
    loop: Callable[[Trial], None]
    begins: bool = False
    """Whether it can begin at any step of a run, and is trained so too (`Trial.steps`)."""
    own_pace: bool = False
    """Whether the time of its steps is part of it: it is trained at no other pace."""
    every_step: bool = False
    """Whether it is told in time, and with its cause, only where everything is sampled at every step."""
    synthetic: str = ""
    """What is made up, where something is: the hardware that is not there."""


class Trial:
    """One run of a loop. The loop says from which step on the fault has an effect (`onset`)."""

    def __init__(
        self,
        fault: Fault,
        *,
        faulty: bool,
        seed: int,
        address: str,
        every_step: bool = False,
        late: bool = False,
        pace: int = 0,
    ) -> None:
        """`every_step`: everything is sampled at every step; else as the default settings have it. `late`: the fault
        begins at a random step of `LATE_STEPS`. `pace`: milliseconds that a step takes at least."""
        self.fault, self.faulty, self.seed, self.every_step = fault, faulty, seed, every_step
        self.run = f"{fault.id} {'faulty' if faulty else 'healthy'} {seed}"
        self._step_seconds = pace / 1000
        self._late = random.Random(f"{fault.id} {seed}").randint(*LATE_STEPS) if late else 0
        self.onset = self.trained = self.dropped = 0
        self.onset_time = 0.0
        self._address = address
        self._monitor: Any = None
        torch.manual_seed(seed)

    def attach(self, model: Any, optimizer: Any, **options: Any) -> sentinel.Monitor:
        """Watched from the first step on."""
        overhead = {"overhead": 1.0} if self.every_step else {}
        options = {**overhead, "run": self.run, "address": self._address, **options}
        self._monitor = sentinel.attach(model, optimizer, **options)
        deadline = time.monotonic() + CONNECT_SECONDS
        while self._monitor.state != "streaming":
            assert time.monotonic() < deadline, self._monitor.state
            time.sleep(0.002)
        return self._monitor

    def steps(self, count: int, onset: int = 0) -> Iterator[tuple[int, bool]]:
        """(step, whether the fault is on): at `onset` and after it, in a faulty run. Of one that begins late the steps
        that go before are negative."""
        ahead = max(self._late - onset, 0)
        self.onset = onset + ahead
        sender = find_session(self._monitor).sender
        for step in itertools.count(-ahead):
            if step >= count and (not ahead or time.time() > self.onset_time + LATE_SECONDS):
                return
            began = time.monotonic()
            self.onset_time = time.time() if step == onset else self.onset_time
            yield step, self.faulty and step >= onset
            self.trained += 1
            time.sleep(max(began + self._step_seconds - time.monotonic(), 0.0))
            while len(sender.queue.records) > AHEAD_STEPS and not sender.done:
                sender.wake()
                time.sleep(0.005)

    def train(self) -> None:
        """The loop, until its daemon has all of it."""
        monitor_module.GOODBYE_SECONDS = 60.0
        try:
            self.fault.loop(self)
        finally:
            if self._monitor is not None:
                self.dropped = find_session(self._monitor).sender.queue.dropped
                self._monitor.detach()
