"""What runs inside the training process. Imports torch, msgspec and the leaves of `sentinel`, nothing else of ours.

optimizer step -> optimizer monitor (probes) -> records -> sender -> the daemon's socket
the daemon's command -> sender -> session -> governor, terminal, restorer -> applied at the exit of a step
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "sentinel.attach and the integrations work inside a PyTorch program, and torch is not installed in this "
        "environment: pip install 'training-sentinel[torch]'",
        name="torch",
    ) from None

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.session import attach as attachment
from sentinel.hooks.session.arguments import refuse_unnamed
from sentinel.hooks.session.monitor import Monitor

__all__ = ["Monitor", "Probe", "Rollback", "Step", "attach", "resume"]

if TYPE_CHECKING:
    from sentinel.hooks.session.resume import resume

_P = ParamSpec("_P")


def _accept_engine(function: Callable[_P, Monitor]) -> Callable[_P, Monitor]:
    """Make `attach` pass a DeepSpeed engine to its integration, which uses the engine's own optimizer."""

    @functools.wraps(function)
    def attach(*args: _P.args, **kwargs: _P.kwargs) -> Monitor:
        model = args[0] if args else kwargs.get("model")
        if isinstance(model, getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", ())):
            from sentinel.hooks import deepspeed

            refuse_unnamed(args[2:])
            options = {name: value for name, value in kwargs.items() if name not in ("model", "optimizer")}
            return deepspeed.attach(model, **options)
        return function(*args, **kwargs)

    return attach


attach = _accept_engine(attachment.attach)


def __getattr__(name: str) -> Any:
    if name == "resume":  # the code for snapshots costs a megabyte in each process that loads it
        from sentinel.hooks.session.resume import resume

        return resume
    raise AttributeError(f"module 'sentinel.hooks' has no attribute {name!r}")
