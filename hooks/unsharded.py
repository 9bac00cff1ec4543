"""Where FSDP2 (`fully_shard`) adds up the gradients of several passes in bfloat16, before ranks reduce them.

It does so while `set_requires_gradient_sync(False)` holds, in the type of the passes, unless `reduce_dtype` of its
MixedPrecisionPolicy is a wider one. The parameters that autograd adds to are FSDP's own then, whole, and not the shards
that the optimizer has. The names used here are private to torch (2.13): what is not there is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn


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
