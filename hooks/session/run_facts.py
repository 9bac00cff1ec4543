"""What the run is: sent with the hello, used by diagnosis, shown on attach."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from sentinel.hooks.core.host_memory import memory_left, memory_limit
from sentinel.hooks.core.identity import printable
from sentinel.hooks.hang import flight_recorder
from sentinel.hooks.measure import cpu_kernel
from sentinel.hooks.torch_interop.internals import Dropout, NormWithStatistics
from sentinel.hooks.torch_interop.layer_table import class_name, wrappers

_LISTED = 8
"""Optimizers, and groups of one, that are described: loops may have an optimizer for each parameter."""
_WIDEST = range(-(2**63), 2**64)
"""Integers that a message can hold."""


def facts(models: Sequence[nn.Module], optimizers: Sequence[Any], loader: object, scaler: object) -> dict[str, Any]:
    """Plain values only, by name. Counts are of this rank's parameters."""
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
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": _device(),
        "kernel_missing": cpu_kernel.missing() if any(p.is_cpu for p in own.values()) else "",
        "collective_timeout_seconds": flight_recorder.timeout_seconds(),
        **_limits(),
    }


def gpus(models: Sequence[nn.Module]) -> tuple[str, ...]:
    """UUIDs of the GPUs that the models are on: CUDA's own, whatever CUDA_VISIBLE_DEVICES leaves over, and of a MIG
    device its own or its GPU's. None on the CPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    used = {p.device.index for model in models for p in model.parameters() if p.device.type == "cuda"}
    used.update(index for model in models for index in getattr(model, "device_ids", None) or () if type(index) is int)
    found = [torch.cuda.get_device_properties(index) for index in sorted(used or {torch.cuda.current_device()})]
    return tuple(str(properties.uuid) for properties in found if hasattr(properties, "uuid"))


def _mode_dependent(models: Sequence[nn.Module]) -> dict[str, int]:
    """Modules that compute something else in evaluation mode, by kind: what `model.train()` is for."""
    kinds = (Dropout, NormWithStatistics)
    found = Counter(
        type(module).__name__ for model in models for module in model.modules() if isinstance(module, kinds)
    )
    return dict(found.most_common(_LISTED))


def _kinds(optimizers: Sequence[Any]) -> str:
    counts = Counter(type(optimizer).__name__ for optimizer in optimizers)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _limits() -> dict[str, int | str]:
    """Bytes of host and device memory that there are, as far as the system says, and what leaves the host's least."""
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
            {"parameters": len(group["params"]), **{k: _value(v) for k, v in group.items() if k != "params"}}
            for group in optimizer.param_groups[:_LISTED]
        ],
    }


def _loader(loader: Any) -> dict[str, Any]:
    names = ("batch_size", "num_workers", "drop_last", "pin_memory")
    return {name: _value(getattr(loader, name)) for name in names if hasattr(loader, name)}


def _value(value: Any) -> Any:
    """As plain as a message wants it: a rate may be one of numpy's floats, a seed longer than 64 bits."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return number if (number := int(value)) in _WIDEST else str(number)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, tuple | list):
        return [_value(one) for one in value]
    return str(value) if isinstance(value, torch.dtype | torch.device) else type(value).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
