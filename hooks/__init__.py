"""What runs inside the training process. Imports torch, msgspec and the leaves of `sentinel`, nothing else of ours.

optimizer step -> stream (probes) -> readout -> sender -> the daemon's socket
the daemon's word -> sender -> session -> pacing, terminal, restorer -> applied at the exit of a step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sentinel.hooks.attachment import attach
from sentinel.hooks.monitor import Monitor
from sentinel.hooks.probe import Probe, Step
from sentinel.hooks.rollback_terms import Rollback

__all__ = ["Monitor", "Probe", "Rollback", "Step", "attach", "resume"]

if TYPE_CHECKING:
    from sentinel.hooks.resumption import resume


def __getattr__(name: str) -> Any:
    if name == "resume":  # what makes and restores snapshots is a megabyte in each process that loads it
        from sentinel.hooks.resumption import resume

        return resume
    raise AttributeError(f"module 'sentinel.hooks' has no attribute {name!r}")
