"""Finds objects that belong to a run and were not passed to `attach`: scaler, schedulers, optimizers and models.

It walks over all objects, about 75 ms for 400,000 of them; used only where nothing else can know. Objects are selected
by their type: `isinstance` on everything would trigger lazy modules and proxies.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from sentinel.hooks.torch_interop.layer_table import unwrap_model


def bystanders(optimizers: Sequence[Any]) -> tuple[list[GradScaler], list[Any]]:
    """Return (enabled scalers, outermost schedulers of these optimizers) in this process, in no order."""
    own = {id(optimizer) for optimizer in optimizers}
    found = list_instances(GradScaler, LRScheduler, ReduceLROnPlateau)
    scalers = [thing for thing in found if isinstance(thing, GradScaler) and thing.is_enabled()]
    schedulers = [thing for thing in found if id(getattr(thing, "optimizer", None)) in own]
    return scalers, outermost(schedulers)


def outermost(schedulers: Sequence[Any]) -> list[Any]:
    """Return the schedulers that no other one holds: SequentialLR and ChainedScheduler save and load their own."""
    inner = {id(one) for scheduler in schedulers for one in getattr(scheduler, "_schedulers", ())}
    return [scheduler for scheduler in schedulers if id(scheduler) not in inner]


def averages() -> list[AveragedModel]:
    """Return the averaged models of this process, in no order."""
    return list_instances(AveragedModel)


def holders_of(optimizer: object) -> list[Any]:
    """Return the optimizers of this process that step this one."""
    return [one for one in list_instances(Optimizer) if any(value is optimizer for value in vars(one).values())]


def trainers() -> tuple[list[Optimizer], list[nn.Module]]:
    """Return (optimizers that train something, modules that no other one contains) of this process."""
    optimizers: list[Optimizer] = []
    modules: list[nn.Module] = []
    for thing in list_instances(Optimizer, nn.Module):
        if isinstance(thing, nn.Module):
            if "_modules" in vars(thing):
                modules.append(thing)
        elif is_optimizer(thing) and any(p.requires_grad for group in thing.param_groups for p in group["params"]):
            optimizers.append(thing)
    inner = {id(child) for module in modules for child in module._modules.values()}
    return optimizers, [module for module in modules if id(module) not in inner]


def list_steered() -> frozenset[int]:
    """Return the ids of the parameters that any optimizer of this process has."""
    optimizers = (one for one in list_instances(Optimizer) if is_optimizer(one))
    return frozenset(id(p) for one in optimizers for group in one.param_groups for p in group["params"])


def list_unsteered(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of the `modules` that have gradients, and of whose parameters no optimizer has any."""
    steered = list_steered()
    own = [(module, list(module.parameters())) for module in modules]
    return [
        module for module, parameters in own
        if any(p.grad is not None for p in parameters) and steered.isdisjoint(map(id, parameters))
    ]  # fmt: skip


def engine_of(optimizer: Optimizer) -> Any:
    """Return the DeepSpeed engine that steps this optimizer; None where there is none."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    for engine in list_instances(kind) if kind is not None else ():
        outer = getattr(engine, "optimizer", None)
        if optimizer in (outer, getattr(outer, "optimizer", None)):
            return engine
    return None


def owners(optimizer: Optimizer, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the `modules` that own the optimizer's parameters: as few as hold all that any of them holds."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    held = [(module, wanted.intersection(map(id, module.parameters()))) for module in modules]
    found: list[nn.Module] = []
    while True:
        best, own = max(held, key=lambda pair: len(pair[1]), default=(None, set[int]()))
        if best is None or not own:
            return found
        found.append(best)
        held = [(module, others - own) for module, others in held]


def replicating(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models, each replaced by the DistributedDataParallel around it: the loop calls that one, even where it
    passed the module inside, as the Hugging Face Trainer does. Searched only where there are several ranks."""
    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return list(models)
    holders = {id(unwrap_model(ddp)): ddp for ddp in list_instances(nn.parallel.DistributedDataParallel)}
    found = [(model, holders.get(id(unwrap_model(model)), model)) for model in models]
    return [model if any(inner is holder for inner in model.modules()) else holder for model, holder in found]


def is_optimizer(thing: object) -> bool:
    """Whether `thing` is a complete optimizer. A wrapper may be an Optimizer by class and have none of its attributes:
    Accelerate's does not call super().__init__()."""
    return isinstance(thing, Optimizer) and "_optimizer_step_pre_hooks" in vars(thing)


def list_instances(*classes: type) -> list[Any]:
    """List the objects of these classes and their subclasses, found by what refers to a class.

    A list of all objects would also hold the tuples that other threads are filling at this moment, and
    `tuple(generator)` ends with a SystemError where anything else refers to its tuple.
    """
    kinds, waiting = set[type](), list(classes)
    while waiting:
        kind = waiting.pop()
        if kind not in kinds:
            kinds.add(kind)
            waiting += type.__subclasses__(kind)
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


WRAPPERS = 8
"""Most wrappers around an optimizer that are opened: one may name itself as what it wraps."""
