"""What runs inside the training process. Imports torch, msgspec and the leaves of `sentinel`, nothing else of ours.

optimizer step -> stream (probes) -> readout -> sender -> the daemon's socket
the daemon's word -> sender -> session -> pacing, terminal, restorer -> applied at the exit of a step
"""

from __future__ import annotations

from sentinel.hooks.attachment import attach
from sentinel.hooks.monitor import Monitor
from sentinel.hooks.probe import Probe, Step
from sentinel.hooks.resumption import resume
from sentinel.hooks.rollback import Rollback

__all__ = ["Monitor", "Probe", "Rollback", "Step", "attach", "resume"]
