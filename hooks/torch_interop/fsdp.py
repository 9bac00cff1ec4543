"""Parameters that FSDP1 (`FullyShardedDataParallel`) has sharded: its flat parameters look like plain tensors.

    use_orig_params=True    the model's own parameters are views of this rank's part of a flat one; what lies on other
                            ranks is empty here
    use_orig_params=False   the flat parameter itself, `_flat_param`

FSDP2 (`fully_shard`) has DTensors, which say themselves how they are spread. Read where it is: no collective. The names
are private ones of torch.distributed.fsdp, and where they are gone its parameters are taken for plain ones.

Where FSDP2 (`fully_shard`) adds up the gradients of several passes in bfloat16, before ranks reduce them.

It does so while `set_requires_gradient_sync(False)` holds, in the type of the passes, unless `reduce_dtype` of its
MixedPrecisionPolicy is a wider one. The parameters that autograd adds to are FSDP's own then, whole, and not the shards
that the optimizer has. The names used here are private to torch (2.13): what is not there is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

WRAPPER = "FullyShardedDataParallel"


class FlatShard(NamedTuple):
    """How a parameter lies over the ranks, in the terms of a DTensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    placement: tuple[str, ...]
    mesh: tuple[int, ...]
    coordinates: tuple[int, ...]


def is_flattened(module: nn.Module) -> bool:
    """Whether it is FSDP1's wrapper."""
    # By name: torch.distributed.fsdp takes long to import, and is not to be had everywhere.
    return any(base.__name__ == WRAPPER for base in type(module).__mro__)


def spreads(models: Sequence[nn.Module]) -> dict[int, FlatShard]:
    """id of each sharded parameter of FSDP1 -> how it is spread. Empty under NO_SHARD, whose replicas are whole."""
    return {key: spread for model in models for module in model.modules() for key, spread in _list_spreads(module)}


def _list_spreads(module: Any) -> Iterator[tuple[int, FlatShard]]:
    handle: Any = getattr(module, "_handle", None) if is_flattened(module) else None
    if handle is None or not handle.uses_sharded_strategy:
        return
    groups: list[Any] = [module.process_group]
    placement: tuple[str, ...] = ("shard(0)",)
    if module.sharding_strategy.name.strip("_").startswith("HYBRID"):
        groups.insert(0, module._inter_node_pg)
        placement = ("replicate", "shard(0)")
    mesh: tuple[int, ...] = tuple([group.size() for group in groups])
    coordinates: tuple[int, ...] = tuple([group.rank() for group in groups])
    flat = handle.flat_param
    if handle._use_orig_params:
        for parameter, shape in zip(flat._params, flat._shapes, strict=True):
            yield id(parameter), FlatShard(tuple(shape), placement, mesh, coordinates)
    else:
        yield id(flat), FlatShard(tuple(flat._unpadded_unsharded_size), placement, mesh, coordinates)


def coarse_sums(models: Iterable[nn.Module]) -> list[tuple[torch.Tensor, Callable[[], bool]]]:
    """(parameter, whether the present pass ends in a reduction) of those whose gradients may be summed in bfloat16."""
    found: dict[int, tuple[torch.Tensor, Callable[[], bool]]] = {}
    for group in (group for model in models for group in _groups(model)):
        for one in getattr(group, "fsdp_params", ()):
            whole = getattr(one, "_unsharded_param", None)
            wider = getattr(one, "reduce_dtype", None) not in (None, torch.bfloat16)
            if whole is not None and whole.requires_grad and whole.dtype is torch.bfloat16 and not wider:
                found[id(whole)] = whole, partial(_reduces, group)
    return list(found.values())


def _reduces(group: Any) -> bool:
    return bool(group.reduce_grads)


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        state_of = getattr(module, "_get_fsdp_state", None)
        state = state_of() if callable(state_of) else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # as it was when a module had but one
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)
