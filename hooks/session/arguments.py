"""What `attach` is given: taken out of its wrappers and checked, with errors that say the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from sentinel.errors import AttachError
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.discovery import WRAPPERS
from sentinel.hooks.torch_interop.layer_table import named_parameters

_NAMED = 3
"""Parameters that an error lists by name."""


def models_of(model: object) -> list[nn.Module]:
    """The models, as the loop calls them. Raises AttachError for anything else."""
    given: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for one in given:
        if not isinstance(one, nn.Module):
            raise AttachError(
                f"attach(model, optimizer): the model is a {type(one).__name__}, not a torch.nn.Module; "
                "pass the module that the loop calls, or a list of such"
            )
    if not given:
        raise AttachError("attach(model, optimizer): the list of models is empty")
    return given


def optimizers_of(optimizer: object) -> list[Any]:
    """The optimizers themselves, out of wrappers that have them as `.optimizer`, or as `.base_optimizer` where they
    take a first and a second step (Foret and others, Sharpness-Aware Minimization, 2021). Raises AttachError."""
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not given:
        raise AttachError("attach(model, optimizer): the list of optimizers is empty")
    found = [_unwrap_optimizer(one) for one in given]
    if len({id(one) for one in found}) < len(found):
        raise AttachError("attach(model, optimizer): the same optimizer is in the list twice")
    return found


def check(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Raises AttachError where there is nothing to watch, or the two do not belong together."""
    named = list(named_parameters(models))
    names = " and ".join(type(model).__name__ for model in models)
    if not named:
        raise AttachError(f"{names} has no parameters: attach after its layers are made")
    if lazy := [name for _, name, parameter in named if isinstance(parameter, UninitializedParameter)]:
        raise AttachError(
            f"{names} has parameters that are not made yet ({list_names(lazy)}): run one batch through the model first"
        )
    if not any(parameter.requires_grad for _, _, parameter in named):
        raise AttachError(f"{names} has no parameter that trains (requires_grad is False on all {len(named)})")
    known = {id(parameter) for _, _, parameter in named}
    for optimizer in optimizers:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in known for p in own):
            if any(type(model).__name__ == "DeepSpeedEngine" for model in models):
                raise AttachError("DeepSpeed has flattened the parameters: use sentinel.hooks.deepspeed.attach(engine)")
            raise AttachError(_strangers(type(optimizer).__name__, own, names, named))


def outside(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Names of the parameters that train and that no optimizer has."""
    own = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return [name for _, name, p in named_parameters(models) if p.requires_grad and id(p) not in own]


def list_names(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _unwrap_optimizer(optimizer: Any) -> Any:
    inner, kind = optimizer, type(optimizer).__name__
    for _ in range(WRAPPERS):
        if discovery.is_optimizer(inner):
            base = getattr(inner, "base_optimizer", None)
            # SAM and its like are stepped by methods of their own, and step what they hold.
            return base if hasattr(inner, "second_step") and discovery.is_optimizer(base) else inner
        outer, inner = inner, getattr(inner, "optimizer", None)
        if inner is None and isinstance(outer, torch.optim.Optimizer):
            raise AttachError(
                f"attach(model, optimizer): {kind} is a torch.optim.Optimizer whose __init__ does not call "
                "super().__init__(params, defaults); its step takes no hooks without that"
            )
    raise AttachError(
        f"attach(model, optimizer): the optimizer is a {kind}, not a torch.optim.Optimizer nor a wrapper that has one "
        "as .optimizer"
    )


def _strangers(optimizer: str, own: list[torch.Tensor], model: str, named: list[tuple[str, str, torch.Tensor]]) -> str:
    shapes = list_names([f"param_groups[0]['params'][{i}] of shape {tuple(p.shape)}" for i, p in enumerate(own)])
    return (
        f"none of the {len(own)} parameters of {optimizer} ({shapes}) is one of {model}'s "
        f"({list_names([name for _, name, _ in named])}): make the optimizer from this model's parameters, "
        "after it was moved to its device and wrapped"
    )
