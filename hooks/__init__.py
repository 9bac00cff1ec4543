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
from sentinel.hooks.torch_interop import discovery

__all__ = ["Monitor", "Probe", "Rollback", "Step", "attach", "resume"]

if TYPE_CHECKING:
    from sentinel.hooks.session.resume import resume

_P = ParamSpec("_P")


def _accept_engine(function: Callable[_P, Monitor]) -> Callable[_P, Monitor]:
    """Make `attach` pass a DeepSpeed engine to its integration, which uses the engine's own optimizer.

    The engine is the model, or is found by the optimizer: the Hugging Face Trainer shows its callbacks the model inside
    the engine, and a wrapper of the engine's optimizer.
    """

    @functools.wraps(function)
    def attach(*args: _P.args, **kwargs: _P.kwargs) -> Monitor:
        given = {**kwargs, **dict(zip(("model", "optimizer"), args, strict=False))}
        engine = _find_engine(given.pop("model", None), given.pop("optimizer", None))
        if engine is None:
            return function(*args, **kwargs)
        from sentinel.hooks import deepspeed

        refuse_unnamed(args[2:])
        return deepspeed.attach(engine, **given)

    return attach


def _find_engine(model: Any, optimizer: Any) -> Any:
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    if kind is None:
        return None
    if isinstance(model, kind):
        return model
    return discovery.engine_of(getattr(optimizer, "optimizer", optimizer))


attach = _accept_engine(attachment.attach)


def __getattr__(name: str) -> Any:
    if name == "resume":  # the code for snapshots costs a megabyte in each process that loads it
        from sentinel.hooks.session.resume import resume

        return resume
    raise AttributeError(f"module 'sentinel.hooks' has no attribute {name!r}")
