"""What torch knows and does not publish, under names that say what it is. They are torch's own objects, not wrappers:
some are asked at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as backward_pass_id
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader

__all__ = [
    "BatchNorm",
    "Dropout",
    "LoaderIterator",
    "NormWithStatistics",
    "TorchDispatchMode",
    "backward_pass_id",
    "current_autograd_node",
    "default_group_seconds",
    "flight_record_dumps",
    "foreach_norm",
    "in_backward",
    "is_any_autocast_enabled",
    "list_group_members",
    "release_pinned_memory",
    "script_compiler",
]

BatchNorm = nn.modules.batchnorm._BatchNorm
NormWithStatistics = nn.modules.batchnorm._NormBase
"""Batch and instance norm: what may keep running statistics."""
Dropout = nn.modules.dropout._DropoutNd
LoaderIterator = dataloader._BaseDataLoaderIter
"""Of a DataLoader, with workers or without."""
script_compiler: Any = torch.jit._recursive
"""The module whose `create_script_module` makes TorchScript of a module."""
foreach_norm = torch._foreach_norm


def in_backward() -> bool:
    """Whether this thread runs a backward pass; what a checkpoint computes again there is part of it."""
    return backward_pass_id() != -1


def release_pinned_memory() -> None:
    """Return pinned memory that nobody holds to the system. Waits for the GPUs, and raises where one has failed."""
    empty = getattr(torch._C, "_host_emptyCache", None)  # without CUDA there is none
    if empty is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty()


def flight_record_dumps() -> list[Callable[[], bytes]]:
    """NCCL records into a ring of its own, which the one of all backends does not show in every version of torch. It is
    first: of a group that has gloo for the CPU beside it, NCCL's are the collectives that train."""
    module = getattr(torch._C, "_distributed_c10d", None)
    found = (getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    return [dump for dump in found if dump is not None]


def list_group_members() -> dict[str, list[int]]:
    """Name of each process group -> its ranks."""
    return {group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map}


def default_group_seconds() -> float:
    """After which the default process group gives up; 0: it does not say."""
    try:
        group = dist.distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    except (AttributeError, RuntimeError, ValueError):  # private names come and go
        return 0.0
