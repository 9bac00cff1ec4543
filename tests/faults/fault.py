"""A fault and its healthy twin: one training loop, with the fault or without."""

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
"""Most seconds from a fault to its alert at default settings."""
LATE_LEAST = 1200
"""Least steps after a fault that begins late: samples of tier 3 are 1,024 steps apart, which is more than 5 s in a loop
that is slowed down."""
AHEAD_STEPS = 512
"""Steps that may wait for the sender: a loop of 1 ms steps outruns the daemon, and dropped steps are not judged."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the catalogue (docs/detection.md), or one of several ways to cause it."""

    id: str
    """The row's id; `P1 backward` is another way to cause P1."""
    what: str
    alert: str
    signal: str
    """The signal in whose samples the delay is counted; `seconds` or `readings`: it is measured by the clock."""
    delay: int
    """Most samples (or seconds) from the first step at which the fault has an effect to the alert."""
    cause: str
    """Pattern that the diagnosed cause must match.

    ONSET stands for the step at which the fault begins, NEAR for one of ten steps from the step before on, AROUND for
    `between steps` with the numbers of two samples around it.
    """
    late_cause: str = ""
    """Pattern for a device, where values are read some steps later; empty: the same."""
    names: tuple[str, ...] = ()
    """Patterns that the case must match as well."""
    loop: Callable[[Trial], None]
    begins: bool = False
    """Whether it can begin at any step of a run, and is also trained with a late beginning (`Trial.steps`)."""
    own_pace: bool = False
    """Whether the time of its steps is part of the fault, so that it is trained at its own pace only."""
    every_step: bool = False
    """Whether its alert comes in time and with its cause only if everything is sampled at every step."""
    synthetic: str = ""
    """What is made up, such as hardware that does not exist; empty: nothing."""


class Trial:
    """One run of a fault's loop, which says from which step on the fault has an effect (`onset`)."""

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
        """Prepare the run.

        `every_step`: sample everything at every step, not as by default. `late`: the fault begins at a random step of
        `LATE_STEPS`. `pace`: least milliseconds of a step.
        """
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
        """Attach Sentinel, and wait until the daemon is connected, so that the first step is seen."""
        overhead = {"overhead": 1.0} if self.every_step else {}
        options = {**overhead, "run": self.run, "address": self._address, **options}
        self._monitor = sentinel.attach(model, optimizer, **options)
        deadline = time.monotonic() + CONNECT_SECONDS
        while self._monitor.state != "streaming":
            assert time.monotonic() < deadline, self._monitor.state
            time.sleep(0.002)
        return self._monitor

    def find_onset(self, onset: int) -> int:
        """Return how many steps come before the fault, if its loop lets it begin at step `onset`."""
        return max(self._late, onset)

    def steps(self, count: int, onset: int = 0) -> Iterator[tuple[int, bool]]:
        """Yield (step, whether the fault is on): in a faulty run it is on from step `onset` on.

        If the fault begins late, the steps added before step 0 have negative numbers.
        """
        self.onset = self.find_onset(onset)
        ahead = self.onset - onset
        sender = find_session(self._monitor).sender
        for step in itertools.count(-ahead):
            late = step >= onset + LATE_LEAST and time.time() > self.onset_time + LATE_SECONDS
            if step >= count and (not ahead or late):
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
        """Run the loop, and wait until the daemon has all of it."""
        monitor_module.GOODBYE_SECONDS = 60.0
        try:
            self.fault.loop(self)
        finally:
            if self._monitor is not None:
                self.dropped = find_session(self._monitor).sender.queue.dropped
                self._monitor.detach()
