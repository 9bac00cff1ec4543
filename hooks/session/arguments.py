"""The arguments of `attach`: unwraps them, checks them with errors that name the fix, and describes them.

The description is sent in the hello, used by diagnosis, and shown on attach.
"""

from __future__ import annotations

import functools
import inspect
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from sentinel.errors import AttachError, UnknownArgumentError
from sentinel.hooks.core.host_memory import memory_left, memory_limit
from sentinel.hooks.core.identity import printable
from sentinel.hooks.measure import kernels
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.discovery import WRAPPERS
from sentinel.hooks.torch_interop.internals import Dropout, NormWithStatistics, default_group_seconds
from sentinel.hooks.torch_interop.layer_table import class_name, local, named_parameters, wrappers
from sentinel.text import did_you_mean, format_count

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NAMED = 3
"""Number of parameters that an error lists by name."""


def models_of(model: object) -> list[nn.Module]:
    """Return the models as a list, as the loop calls them. Raises AttachError for anything else."""
    given: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    for one in given:
        if not isinstance(one, nn.Module):
            raise AttachError(
                f"attach(model, optimizer): the model is {_name_kind(one)}, not a torch.nn.Module; "
                "pass the module that the loop calls, or a list of such, and the optimizer second"
            )
    if not given:
        raise AttachError("attach(model, optimizer): the list of models is empty")
    return given


def optimizers_of(optimizer: object) -> list[Any]:
    """Return the optimizers themselves, without their wrappers.

    A wrapper has the optimizer as `.optimizer`, or as `.base_optimizer` where it takes a first and a second step (Foret
    and others, Sharpness-Aware Minimization, 2021). Raises AttachError.
    """
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not given:
        raise AttachError("attach(model, optimizer): the list of optimizers is empty")
    found = [_unwrap_optimizer(one) for one in given]
    if len({id(one) for one in found}) < len(found):
        raise AttachError("attach(model, optimizer): the same optimizer is in the list twice")
    return found


_NAMES: dict[str, tuple[type, ...]] = {
    "scaler": (GradScaler,), "scheduler": (LRScheduler, ReduceLROnPlateau), "loader": (DataLoader,), "run": (str,),
}  # fmt: skip
"""Argument of `attach` -> the types of its values, to recognise one that was passed without its name."""


def refuse_unnamed(given: Sequence[object]) -> None:
    """Raise AttachError if anything follows model and optimizer without a name."""
    if not given:
        return
    name = next((name for name, kinds in _NAMES.items() if isinstance(given[0], kinds)), "")
    if discovery.is_optimizer(given[0]):
        fix = "pass several optimizers as a list: attach(model, [first, second])"
    else:
        fix = f"write {name}=..." if name else "write its name (scaler=, scheduler=, loader=, run=), or leave it out"
    raise AttachError(f"attach(model, optimizer): the third argument is {_name_kind(given[0])}, without a name; {fix}")


def refuse_unknown(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make `attach` raise UnknownArgumentError at the first argument name that it does not have.

    The error is a TypeError, as Python's own is, and covers the options that an integration passes on.
    """
    known = [one.name for one in inspect.signature(function).parameters.values() if one.kind is not one.VAR_POSITIONAL]

    @functools.wraps(function)
    def attach(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name in kwargs:
            if name not in known:
                raise UnknownArgumentError(f"attach has no argument {name!r}{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return attach


def check(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Raise AttachError if there is nothing to watch, or if models and optimizers do not belong together."""
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
            raise AttachError(describe_strangers(optimizer, models))


def refuse_meta(models: Sequence[nn.Module]) -> None:
    """Raise AttachError if parameters are on the meta device: torch copies into them without an error, and keeps
    nothing."""
    if bare := [name for _, name, parameter in named_parameters(models) if local(parameter).is_meta]:
        raise AttachError(
            f"resume(model, optimizer): parameters are on the meta device ({list_names(bare)}), and nothing can be "
            "restored into them: call model.to_empty(device=...) before, and make the optimizer after that"
        )


def describe_stray(names: Sequence[str]) -> str:
    """Describe what is not seen when an optimizer has parameters that no model has."""
    return f"the names of {format_count(len(names), 'optimizer parameter')} not in the model"


def warn_of_stray(names: Sequence[str]) -> str:
    """Return the terminal line that says what may be wrong when an optimizer has parameters that no model has."""
    held = f"the optimizer holds {format_count(len(names), 'parameter')} not in the model ({list_names(names)})"
    return (
        f"warning: {held}. If a layer was replaced after the optimizer was made, its new parameters do not train: "
        "make the optimizer after that. If another module has them, pass attach([model, other], optimizer)"
    )


def list_names(names: Sequence[str]) -> str:
    """List the first few of many names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _unwrap_optimizer(optimizer: Any) -> Any:
    inner, kind = optimizer, type(optimizer).__name__
    for _ in range(WRAPPERS):
        if discovery.is_optimizer(inner):
            base = getattr(inner, "base_optimizer", None)
            # SAM and similar optimizers are stepped by methods of their own, which step the optimizer that they hold.
            return base if hasattr(inner, "second_step") and discovery.is_optimizer(base) else inner
        outer, inner = inner, getattr(inner, "optimizer", None)
        if inner is None and isinstance(outer, torch.optim.Optimizer):
            raise AttachError(
                f"attach(model, optimizer): {kind} is a torch.optim.Optimizer whose __init__ does not call "
                "super().__init__(params, defaults); its step takes no hooks without that"
            )
    raise AttachError(
        f"attach(model, optimizer): the optimizer is {_name_kind(optimizer)}, not a torch.optim.Optimizer nor a "
        "wrapper that has one as .optimizer"
    )


def _name_kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"


def describe_strangers(optimizer: Any, models: Sequence[nn.Module]) -> str:
    """Say that the optimizer has no parameter of these models, and what to write."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    shapes = list_names([f"param_groups[0]['params'][{i}] of shape {tuple(p.shape)}" for i, p in enumerate(own)])
    named = list_names([name for _, name, _ in named_parameters(models)])
    return (
        f"none of the {len(own)} parameters of {type(optimizer).__name__} ({shapes}) is one of "
        f"{' and '.join(type(model).__name__ for model in models)}'s ({named}): make the optimizer from this model's "
        "parameters, after it was moved to its device and wrapped"
    )


_LISTED = 8
"""Number of optimizers, and of groups in each, that are described: loops may have an optimizer for each parameter."""
_PER_PARAMETER = ("params", "param_names")
"""What a group lists for each of its parameters: the daemon refuses a hello of 256 KiB."""
_WIDEST = range(-(2**63), 2**64)
"""Range of the integers that a message can hold."""


def facts(
    models: Sequence[nn.Module], optimizers: Sequence[Any], loader: object, scaler: object, total_steps: int | None
) -> dict[str, Any]:
    """Return the description by name, as plain values.

    Counts are of this rank's parameters. `total_steps` is the planned number of steps of the run; None: not known.
    """
    own = {id(p): p for model in models for p in model.parameters()}
    counts = [p.numel() for p in own.values()]
    return {
        "model": ", ".join(map(class_name, models)),
        "mode_dependent": _mode_dependent(models),
        "wrappers": [name for model in models for name in wrappers(model)],
        "parameters": sum(counts),
        "parameters_trainable": sum(p.numel() for p in own.values() if p.requires_grad),
        "tensors": len(counts),
        "dtypes": sorted({_short(p.dtype) for p in own.values()}),
        "devices": sorted({str(p.device) for p in own.values()}),
        "optimizer": _kinds(optimizers),
        "optimizers": [_optimizer(optimizer) for optimizer in optimizers[:_LISTED]],
        "scaler": type(scaler).__name__ if scaler is not None else "",
        "loader": _loader(loader),
        "total_steps": total_steps,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": _device(),
        "kernel_missing": kernels.kernel_missing if any(p.is_cpu for p in own.values()) else "",
        "collective_timeout_seconds": default_group_seconds(),
        **_limits(),
    }


def gpus(models: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that the models are on; empty on the CPU.

    They are CUDA's, whichever devices CUDA_VISIBLE_DEVICES leaves; a MIG device has its own UUID or that of its GPU.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    used = {p.device.index for model in models for p in model.parameters() if p.device.type == "cuda"}
    used.update(index for model in models for index in getattr(model, "device_ids", None) or () if type(index) is int)
    found = [torch.cuda.get_device_properties(index) for index in sorted(used or {torch.cuda.current_device()})]
    return tuple(str(properties.uuid) for properties in found if hasattr(properties, "uuid"))


def _mode_dependent(models: Sequence[nn.Module]) -> dict[str, int]:
    """Count, by class, the modules that compute something else in evaluation mode: those that need `model.train()`."""
    kinds = (Dropout, NormWithStatistics)
    found = Counter(
        type(module).__name__ for model in models for module in model.modules() if isinstance(module, kinds)
    )
    return dict(found.most_common(_LISTED))


def _kinds(optimizers: Sequence[Any]) -> str:
    counts = Counter(type(optimizer).__name__ for optimizer in optimizers)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _limits() -> dict[str, int | str]:
    """Return the bytes of host and device memory, as far as the system says, and what limits the host's memory most."""
    host = memory_limit()
    limits: dict[str, int | str] = {"memory_limited_by": memory_left()[1]}
    if host < float("inf"):
        limits["memory_limit_bytes"] = int(host)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        limits["device_memory_bytes"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return limits


def _device() -> str:
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name() if initialized else platform.machine()


def _optimizer(optimizer: Any) -> dict[str, Any]:
    return {
        "class": type(optimizer).__name__,
        "groups": [
            {"parameters": len(group["params"]), **{k: _value(v) for k, v in group.items() if k not in _PER_PARAMETER}}
            for group in optimizer.param_groups[:_LISTED]
        ],
    }


def _loader(loader: Any) -> dict[str, Any]:
    names = ("batch_size", "num_workers", "drop_last", "pin_memory")
    return {name: _value(getattr(loader, name)) for name in names if hasattr(loader, name)}


def _value(value: Any) -> Any:
    """Convert to a value that a message can hold: a rate may be a numpy float, a seed may be longer than 64 bits."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return number if (number := int(value)) in _WIDEST else str(number)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, tuple | list) and len(value) <= _LISTED:
        return [type(one).__name__ if isinstance(one, tuple | list) else _value(one) for one in value]
    return str(value) if isinstance(value, torch.dtype | torch.device) else type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
