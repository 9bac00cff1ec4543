"""A model that DeepSpeed's ZeRO has partitioned, as the hooks know distributed models: each parameter with the part
that this rank keeps of it, flat.

    stages 1 and 2   parameters are whole; master weights and reduced gradients lie in one flat buffer, of which a rank
                     has a piece: a part of some parameters, all of others, nothing of most
    stage 3          each parameter is spread evenly over the ranks, the last part padded

Read where they are: no collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_EMPTY = torch.empty(0)


class Mesh:
    """The ranks that a parameter is spread over, in a row."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.shape = (dist.get_world_size(group),)
        self._rank = dist.get_rank(group)

    def get_coordinate(self) -> list[int]:
        """This rank's place in the row."""
        return [self._rank]


class Flat:
    """Placement: spread over the ranks along its elements."""

    dim = 0


class PartitionShard:
    """One parameter, as much of it as this rank keeps. Looks like a DTensor to those who ask for its local part."""

    placements = (Flat(),)

    def __init__(self, parameter: Any, mesh: Mesh) -> None:
        self._parameter: Any = parameter
        self.device_mesh = mesh
        self.shape = tuple(getattr(parameter, "ds_shape", parameter.shape))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)  # type, device, whether it trains

    @property
    def grad(self) -> Any:
        """This rank's part of the reduced gradient, flat; None where it has none."""
        if hasattr(self._parameter, "ds_id"):
            return self._strip_padding(self._parameter._z3_optimizer.get_local_fp32_grad_for_param(self._parameter))
        mapping = getattr(self._parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        found = mapping.get_lp_grad_fragment(self._parameter._index_in_param_group)
        if found is not None and found.numel() > mapping.lp_fragment_address.numel:  # kept whole, one piece is ours
            address = mapping.lp_fragment_address
            found = found.view(-1).narrow(0, address.start, address.numel)
        return None if found is None else found.view(-1)

    @property
    def _local_tensor(self) -> Any:
        """This rank's part of the master weights, flat; of a parameter that is frozen, what there is."""
        if hasattr(self._parameter, "ds_id"):
            if not self.requires_grad:
                return self._strip_padding(self._parameter.ds_tensor.view(-1))
            return self._strip_padding(self._parameter._z3_optimizer.get_local_fp32_param(self._parameter))
        mapping = getattr(self._parameter, "_hp_mapping", None)
        if mapping is not None:
            return mapping.hp_fragment.view(-1)
        return _EMPTY if self.requires_grad else self._parameter.detach().view(-1)

    def numel(self) -> int:
        """Elements that it has in all."""
        return int(getattr(self._parameter, "ds_numel", self._parameter.numel()))

    def _strip_padding(self, part: Any) -> Any:
        if part is None:
            return None
        left = self.numel() - self.device_mesh.get_coordinate()[0] * part.numel()
        return part.view(-1)[: max(left, 0)]


class Partitioned(nn.Module):
    """The model, with `Part`s as parameters. Hooks go on the model itself."""

    _model: Any

    def __new__(cls, model: nn.Module) -> Partitioned:
        """Named as the model's class: it is what people are shown."""
        return super().__new__(type(type(model).__name__, (cls,), {}))

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # and not as a part of it
        meshes: dict[int, Mesh] = {}
        self._parts: dict[int, PartitionShard] = {}
        for p in model.parameters():
            group = getattr(p, "ds_process_group", None) or getattr(p, "_dp_group", None)
            self._parts[id(p)] = PartitionShard(p, meshes.setdefault(id(group), Mesh(group)))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """As the model's."""
        for name, p in self._model.named_parameters(*args, **kwargs):
            if id(p) in self._parts:
                yield name, self._parts[id(p)]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """As the model's."""
        return (part for _, part in self.named_parameters(recurse=recurse))

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """On the model."""
        return self._model.register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """On the model."""
        return self._model.register_forward_hook(*args, **kwargs)
