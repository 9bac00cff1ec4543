"""How long DDP's reduction of gradients holds a step up: by the timers of DDP's own logger, on CPU and GPU.

They tell how long gradients were on their way after the backward pass had computed the last of them; what went on
beside it costs nothing. DDP times its first ten iterations and then every hundredth. Sharded models (FSDP) have no such
timers, and host times say nothing of what happens on a GPU: for them there is no number.
"""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step

EARLY, SPACING = 12, 64
"""Steps from the first one at which the logger is read, and of the later ones every so many: it takes 50 us."""
_NANOSECONDS = 1e-9


class Communication(Probe):
    """`communication_seconds`, of one timed iteration."""

    relaxed = True

    def __init__(self) -> None:
        self._iteration = 0

    def after(self, step: Step) -> None:
        if (step.seq < EARLY or step.seq % SPACING == 0) and step.parameters is not None:
            logged = step.parameters.reduction()
            iteration, whole = logged.get("iteration", 0), logged.get("backward_comm_time", 0)
            if iteration != self._iteration and whole:
                self._iteration = iteration
                hidden = logged.get("backward_compute_comm_overlap_time", 0)
                step.values["communication_seconds"] = max(whole - hidden, 0) * _NANOSECONDS
