"""Reads parameters that FSDP and DeepSpeed's ZeRO spread over ranks, where they are no DTensors.

    FSDP1, use_orig_params=True    the model's own parameters are views of this rank's part of a flat one; what lies on
                                   other ranks is empty here
    FSDP1, use_orig_params=False   the flat parameter itself, `_flat_param`
    FSDP2 (`fully_shard`)          DTensors, which contain how they are spread. Under
                                   `set_requires_gradient_sync(False)` it sums the gradients of several passes in the
                                   type of the passes, unless `reduce_dtype` of its MixedPrecisionPolicy is wider. Then
                                   autograd adds to FSDP's own unsharded parameters
    ZeRO, stages 1 and 2           parameters are whole; master weights and reduced gradients lie in one flat buffer, of
                                   which a rank has a piece: a part of some parameters, all of others, nothing of most
    ZeRO, stage 3                  each parameter is spread evenly over the ranks, the last part padded

All is read where it lies: no collective. The names are private ones of torch.distributed.fsdp (2.13) and DeepSpeed.
Where they do not exist, parameters are treated as plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

WRAPPER = "FullyShardedDataParallel"


class FlatShard(NamedTuple):
    """How a parameter is spread over the ranks, in the terms of a DTensor."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    placement: tuple[str, ...]
    mesh: tuple[int, ...]
    coordinates: tuple[int, ...]


def is_flattened(module: nn.Module) -> bool:
    """Whether the module is FSDP1's wrapper."""
    # By name: torch.distributed.fsdp takes long to import, and is not available everywhere.
    return any(base.__name__ == WRAPPER for base in type(module).__mro__)


def spreads(models: Sequence[nn.Module]) -> dict[int, FlatShard]:
    """Return id -> how it is spread, for FSDP1's sharded parameters. Empty under NO_SHARD, whose replicas are whole."""
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
    """Return (parameter, whether this pass ends in a reduction) where gradients may be summed in bfloat16."""
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
        if groups is None:  # in versions where a module has only one
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


_EMPTY = torch.empty(0)


class Mesh:
    """The ranks that a parameter is spread over, as a mesh of one dimension."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.shape = (dist.get_world_size(group),)
        self._rank = dist.get_rank(group)

    def get_coordinate(self) -> list[int]:
        """Return this rank's place in the mesh."""
        return [self._rank]


class Flat:
    """Placement of a parameter that is spread over the ranks along its elements."""

    dim = 0


class PartitionShard:
    """The part of one parameter that this rank keeps. Code that asks for a DTensor's local part can use it as one."""

    placements = (Flat(),)

    def __init__(self, parameter: Any, mesh: Mesh) -> None:
        self._parameter: Any = parameter
        self.device_mesh = mesh
        self.shape = tuple(getattr(parameter, "ds_shape", parameter.shape))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)  # type, device, whether it is trainable

    @property
    def grad(self) -> Any:
        """This rank's part of the reduced gradient, flat; None where it has none."""
        if hasattr(self._parameter, "ds_id"):
            return self._strip_padding(self._parameter._z3_optimizer.get_local_fp32_grad_for_param(self._parameter))
        mapping = getattr(self._parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        found = mapping.get_lp_grad_fragment(self._parameter._index_in_param_group)
        if found is not None and found.numel() > mapping.lp_fragment_address.numel:  # kept whole: only a piece is ours
            address = mapping.lp_fragment_address
            found = found.view(-1).narrow(0, address.start, address.numel)
        return None if found is None else found.view(-1)

    @property
    def _local_tensor(self) -> Any:
        """This rank's part of the master weights, flat, or empty; for a frozen parameter, the elements it has here."""
        if hasattr(self._parameter, "ds_id"):
            if not self.requires_grad:
                return self._strip_padding(self._parameter.ds_tensor.view(-1))
            return self._strip_padding(self._parameter._z3_optimizer.get_local_fp32_param(self._parameter))
        mapping = getattr(self._parameter, "_hp_mapping", None)
        if mapping is not None:
            return mapping.hp_fragment.view(-1)
        return _EMPTY if self.requires_grad else self._parameter.detach().view(-1)

    def numel(self) -> int:
        """Return the number of elements of the whole parameter."""
        return int(getattr(self._parameter, "ds_numel", self._parameter.numel()))

    def _strip_padding(self, part: Any) -> Any:
        if part is None:
            return None
        left = self.numel() - self.device_mesh.get_coordinate()[0] * part.numel()
        return part.view(-1)[: max(left, 0)]


class Partitioned(nn.Module):
    """The model, with `PartitionShard`s as parameters. Hooks are registered on the model itself."""

    _model: Any

    def __new__(cls, model: nn.Module) -> Partitioned:
        """Create an instance whose class has the name of the model's class, which is shown to users."""
        return super().__new__(type(type(model).__name__, (cls,), {}))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # so that it is no submodule
        meshes: dict[int, Mesh] = {}
        self._parts: dict[int, PartitionShard] = {}
        for p in model.parameters():
            group = getattr(p, "ds_process_group", None) or getattr(p, "_dp_group", None)
            self._parts[id(p)] = PartitionShard(p, meshes.setdefault(id(group), Mesh(group)))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the model's parameters with their names, as `PartitionShard`s."""
        for name, p in self._model.named_parameters(*args, **kwargs):
            if id(p) in self._parts:
                yield name, self._parts[id(p)]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Yield the model's parameters, as `PartitionShard`s."""
        return (part for _, part in self.named_parameters(recurse=recurse))

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register the hook on the model."""
        return self._model.register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Register the hook on the model."""
        return self._model.register_forward_hook(*args, **kwargs)
