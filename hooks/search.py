"""What belongs to a run and was not handed to `attach`: its loss scaler, its schedulers; its optimizers and models.

By walks over all objects, about 50 ms for 300,000 of them: where nothing else can know. By type first: `isinstance` on
everything would set off lazy modules and proxies.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sentinel.errors import AttachError


def bystanders(optimizers: Sequence[Any]) -> tuple[list[GradScaler], list[Any]]:
    """(enabled scalers, schedulers of these optimizers) of this process. For rollback alone, which would else leave
    them behind."""
    own = {id(optimizer) for optimizer in optimizers}
    scalers, schedulers = [], []
    for thing in _instances(GradScaler, LRScheduler, ReduceLROnPlateau):
        if isinstance(thing, GradScaler):
            if thing.is_enabled():
                scalers.append(thing)
        elif id(getattr(thing, "optimizer", None)) in own:
            schedulers.append(thing)
    return scalers, schedulers


def completed(optimizers: Sequence[Any], scaler: Any, scheduler: Any, where: str) -> tuple[Any, list[Any]]:
    """(scaler, schedulers) as they were given, and found where they were not. Raises AttachError, with the name of the
    call, where several scalers are found."""
    schedulers = scheduler
    if scaler is None or scheduler is None:
        scalers, found = bystanders(optimizers)
        if scaler is None and len(scalers) > 1:  # some may be of an earlier run, and only the collector finds them
            gc.collect()
            scalers, found = bystanders(optimizers)
        schedulers = found if scheduler is None else scheduler
        if scaler is None and len(scalers) == 1:
            scaler = scalers[0]
        elif scaler is None and scalers:
            raise AttachError(f"rollback: there are {len(scalers)} loss scalers; name the run's: {where}(scaler=...)")
    return scaler, list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]


def trainers() -> tuple[list[Optimizer], list[nn.Module]]:
    """(optimizers that train something, modules that no other one contains) of this process."""
    optimizers: list[Optimizer] = []
    modules: list[nn.Module] = []
    for thing in _instances(Optimizer, nn.Module):
        if isinstance(thing, nn.Module):
            if "_modules" in vars(thing):
                modules.append(thing)
        elif is_optimizer(thing) and any(p.requires_grad for group in thing.param_groups for p in group["params"]):
            optimizers.append(thing)
    inner = {id(child) for module in modules for child in module._modules.values()}
    return optimizers, [module for module in modules if id(module) not in inner]


def engine_of(optimizer: Optimizer) -> Any:
    """The DeepSpeed engine that steps this optimizer; None where there is none."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    for engine in _instances(kind) if kind is not None else ():
        outer = getattr(engine, "optimizer", None)
        if optimizer in (outer, getattr(outer, "optimizer", None)):
            return engine
    return None


def owners(optimizer: Optimizer, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of `modules` that own the optimizer's parameters: as few as hold all that any of them holds."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [(module, wanted.intersection(map(id, module.parameters()))) for module in modules]
    found: list[nn.Module] = []
    while True:
        best, own = max(held, key=lambda pair: len(pair[1]), default=(None, set[int]()))
        if best is None or not own:
            return found
        found.append(best)
        held = [(module, others - own) for module, others in held]


def is_optimizer(thing: object) -> bool:
    """Whether it is one with all its parts. A wrapper may be an Optimizer by class and have none of them: Accelerate's
    does not call super().__init__()."""
    return isinstance(thing, Optimizer) and "_optimizer_step_pre_hooks" in vars(thing)


def _instances(*classes: type) -> Iterator[Any]:
    kinds: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        wanted = kinds.get(kind)
        if wanted is None:
            wanted = kinds[kind] = issubclass(kind, classes)
        if wanted:
            yield thing
