"""The integration with Accelerate: `attach` for what `Accelerator.prepare` returned.

    from sentinel.hooks.accelerate import attach
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = attach(accelerator, model, optimizer, loader=loader)

Accelerate calls the wrapped optimizer only at the steps that gradient accumulation lets through; those are the steps.
"""

from __future__ import annotations

from typing import Any

from sentinel import hooks
from sentinel.hooks.session.monitor import Monitor


def attach(accelerator: Any, model: Any, optimizer: Any, **options: Any) -> Monitor:
    """Attach as `sentinel.attach` does, with the accelerator's loss scaler and schedulers.

    `options` are those of `sentinel.attach`; raises what it raises.
    """
    schedulers = [getattr(wrapped, "scheduler", wrapped) for wrapped in accelerator._schedulers]
    known = {"scaler": accelerator.scaler, "scheduler": schedulers or None}
    return hooks.attach(model, optimizer, **(known | options))
