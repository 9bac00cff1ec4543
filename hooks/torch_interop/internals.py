"""Torch's private functions and classes that are used here, under names that say what they are.

Where possible they are torch's own objects and not wrappers, since some are called at every step.

`exclude_from_tracing` hides our code from torch.compile at no cost where nothing is compiled: `torch._disable_dynamo`
switches dynamo off and on around each call, in 0.7 us, and in several times as much where its code is not in the
processor's caches. Three of them per step were a fifth of what a step of a fast loop costs.

Flight recorders are read on a thread of their own, which a waiting collective does not block. It takes 0.2 ms for ten
entries, 2 ms for the whole ring of 2,000.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as backward_pass_id
from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
from torch._compile import _disable_dynamo
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from sentinel.wire.flight_recorder import Flight, flight_of, merge_flights

__all__ = [
    "BatchNorm",
    "Dropout",
    "LoaderIterator",
    "NormWithStatistics",
    "TorchDispatchMode",
    "UncopiedHook",
    "backward_pass_id",
    "current_autograd_node",
    "default_group_seconds",
    "depth",
    "exclude_from_tracing",
    "foreach_norm",
    "in_backward",
    "is_any_autocast_enabled",
    "is_faking",
    "preserve_version",
    "read_flight_record",
    "release_pinned_memory",
    "script_compiler",
]

BatchNorm = nn.modules.batchnorm._BatchNorm
NormWithStatistics = nn.modules.batchnorm._NormBase
"""Base class of batch and instance norm, which may keep running statistics."""
Dropout = nn.modules.dropout._DropoutNd
LoaderIterator = dataloader._BaseDataLoaderIter
"""Base class of a DataLoader's iterators, with workers or without."""
script_compiler: Any = torch.jit._recursive
"""The module whose `create_script_module` converts a module to TorchScript."""
foreach_norm = torch._foreach_norm
preserve_version = _unsafe_preserve_version_counter
"""Context manager that hides from autograd that a tensor was written to; its content must be the same again at the
end."""


def in_backward() -> bool:
    """Whether this thread runs a backward pass; what a checkpoint computes again is part of it."""
    return backward_pass_id() != -1


def release_pinned_memory() -> None:
    """Return unused pinned memory to the system. Waits for the GPUs, and raises if one has failed."""
    empty = getattr(torch._C, "_host_emptyCache", None)  # missing without CUDA
    if empty is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        empty()


def read_flight_record() -> Flight:
    """Return what this rank did in collectives, as far as this torch shows it: nothing without process groups, or
    before gloo was recorded."""
    if not (dist.is_available() and dist.is_initialized()):
        return Flight()
    members: dict[str, Iterable[int]] = {
        group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map
    }
    # NCCL's own ring comes first, since the ring of all backends does not include it in every version of torch: in a
    # group that also has gloo for the CPU, the training collectives are NCCL's.
    dumps = (
        getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    )
    return merge_flights([flight_of(json.loads(dump()), members) for dump in dumps if dump is not None])


def default_group_seconds() -> float:
    """Return the default process group's timeout in seconds; 0: there is no group, or it does not say."""
    try:
        group = dist.distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    except (AttributeError, RuntimeError, ValueError):  # private names come and go
        return 0.0


_Function = TypeVar("_Function", bound=Callable[..., Any])


def exclude_from_tracing(function: _Function) -> _Function:
    """Return `function` so that dynamo neither traces into nor compiles it. Its code is marked, or that of its class if
    it is a callable object: do not use it for one of another library's.

    Where a graph being traced reaches it, the graph breaks there, as at any function that `torch.compiler.disable` has
    marked. Where bytecode that dynamo made calls it, the interpreter runs it, and all that it calls, as written.
    """
    code: Any = function if isinstance(function, FunctionType) else type(function).__call__
    if not isinstance(code, FunctionType) or not _skip_frames(code.__code__):
        disabled: Any = _disable_dynamo(function)
        return disabled  # type: ignore[no-any-return]
    code._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _skip_frames(code: CodeType) -> bool:
    """Have dynamo skip frames of `code` and all below them. False in a torch that cannot, and where dynamo is not
    loaded: loading takes a second, and no optimizer of torch's exists yet."""
    if "torch._dynamo" not in sys.modules:
        return False
    try:
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    except (ImportError, AttributeError, TypeError):
        return False
    return True


_FAKE = torch._C._TorchDispatchModeKey.FAKE


def is_faking() -> bool:
    """Whether FakeTensorMode is on, as where a program estimates its memory: tensors have no numbers then."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


class UncopiedHook(RemovableHandle):
    """Handle of a module's hook that is in no copy and no pickle of the module.

    In a copy it would watch a model that is not the run's. A pickle must load where Sentinel is not installed, and with
    `weights_only=True`, which accepts no callable that could take the hook's place. The number of a hook that takes
    keywords must not be in it either: in the loading process, a hook of the user's may get the same number.
    Pickle and copy look for `__reduce_ex__` on the dictionary itself, and a dictionary of hooks has attributes.
    """

    def __init__(self, handle: RemovableHandle) -> None:
        self.id, self.hooks_dict_ref, self.extra_dict_ref = handle.id, handle.hooks_dict_ref, handle.extra_dict_ref
        for hooks in self._list_dictionaries():
            vars(hooks).setdefault("__reduce_ex__", _Reduction(hooks)).omitted.add(self.id)

    def remove(self) -> None:
        """Remove the hook."""
        super().remove()
        for hooks in self._list_dictionaries():
            if (reduction := vars(hooks).get("__reduce_ex__")) is not None:
                reduction.omitted.discard(self.id)
                if not reduction.omitted:
                    del vars(hooks)["__reduce_ex__"]

    def _list_dictionaries(self) -> list[OrderedDict[int, Any]]:
        held = (ref() for ref in (self.hooks_dict_ref, *self.extra_dict_ref))
        return [hooks for hooks in held if isinstance(hooks, OrderedDict)]


class _Reduction:
    """`__reduce_ex__` of a dictionary of hooks: that of the same dictionary without ours."""

    def __init__(self, hooks: OrderedDict[int, Any]) -> None:
        self._hooks = weakref.ref(hooks)
        self.omitted = set[int]()
        """Numbers of our hooks."""

    def __call__(self, protocol: Any) -> Any:
        hooks = self._hooks()
        assert hooks is not None
        others = OrderedDict((number, hook) for number, hook in hooks.items() if number not in self.omitted)
        return others.__reduce_ex__(protocol)


_STEP = torch.optim.Optimizer.profile_hook_step(print).__code__
"""Code of the function that torch puts around every step, to call the hooks."""


def depth(optimizer: Any) -> int:
    """Return how many calls of this optimizer's step the calling thread is in, read from the stack: a subclass's step
    may call its parent's, torch calls the hooks for both, and the end of a step that raised is not seen."""
    found = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found
