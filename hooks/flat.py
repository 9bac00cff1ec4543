"""Parameters that FSDP1 (`FullyShardedDataParallel`) has sharded: its flat parameters look like plain tensors.

    use_orig_params=True    the model's own parameters are views of this rank's part of a flat one; what lies on other
                            ranks is empty here
    use_orig_params=False   the flat parameter itself, `_flat_param`

FSDP2 (`fully_shard`) has DTensors, which say themselves how they are spread. Read where it is: no collective. The names
are private ones of torch.distributed.fsdp, and where they are gone its parameters are taken for plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

WRAPPER = "FullyShardedDataParallel"


class Spread(NamedTuple):
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


def spreads(models: Sequence[nn.Module]) -> dict[int, Spread]:
    """id of each sharded parameter of FSDP1 -> how it is spread. Empty under NO_SHARD, whose replicas are whole."""
    return {key: spread for model in models for module in model.modules() for key, spread in _of(module)}


def _of(module: Any) -> Iterator[tuple[int, Spread]]:
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
            yield id(parameter), Spread(tuple(shape), placement, mesh, coordinates)
    else:
        yield id(flat), Spread(tuple(flat._unpadded_unsharded_size), placement, mesh, coordinates)
