"""What runs inside the training process. Imports torch, msgspec and the leaves of `sentinel`, nothing else of ours.

optimizer step -> optimizer monitor (probes) -> records -> sender -> the daemon's socket
the daemon's command -> sender -> session -> governor, terminal, restorer -> applied at the exit of a step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.session.attach import attach
from sentinel.hooks.session.monitor import Monitor

__all__ = ["Monitor", "Probe", "Rollback", "Step", "attach", "resume"]

if TYPE_CHECKING:
    from sentinel.hooks.session.resume import resume


def __getattr__(name: str) -> Any:
    if name == "resume":  # what makes and restores snapshots is a megabyte in each process that loads it
        from sentinel.hooks.session.resume import resume

        return resume
    raise AttributeError(f"module 'sentinel.hooks' has no attribute {name!r}")
