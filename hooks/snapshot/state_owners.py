"""Finds what holds state of a run besides its models and optimizers.

These are schedulers, the loss scaler, averaged models, and optimizers around or inside an optimizer. What exists at
`attach` is found by a walk over all objects. What is made later is noted where it is made, weakly and in order: a walk
at each snapshot would cost 50 ms.
"""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from sentinel.errors import AttachError, StateError
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.layer_table import plain_name, unwrap_model
from sentinel.hooks.torch_interop.tensors import is_expanded

_DELEGATING = ("accelerate.", "lightning.", "pytorch_lightning.", "transformers.", "deepspeed.")
"""Packages whose wrappers around an optimizer hold no state of the run."""
_DEPTH = 8
"""Largest depth of optimizers inside one another."""

_made: list[weakref.ref[Any]] = []
"""Schedulers, scalers and averaged models since `record_constructions`, in the order in which they were made."""


def record_constructions() -> None:
    """Note from now on which schedulers, scalers and averaged models are made.

    This lasts as long as the process: a `__new__` cannot be removed from a class again without a trace.
    """
    for kind in (LRScheduler, ReduceLROnPlateau, GradScaler, AveragedModel):
        if kind.__new__ is object.__new__:
            kind.__new__ = staticmethod(_record_construction)  # type: ignore[method-assign,assignment]


def _record_construction(kind: type[Any], *_: object, **__: object) -> Any:
    one = object.__new__(kind)
    _made.append(weakref.ref(one))
    return one


def _list_made() -> list[Any]:
    _made[:] = [ref for ref in _made if ref() is not None]
    return [one for ref in _made if (one := ref()) is not None]


class Owners:
    """The owners of one run's state, by names that are the same when the run is started again."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        *,
        given: Sequence[Any] = (),
        scaler: Any = None,
        scheduler: Any = None,
        taken: Sequence[object] = (),
        call: str = "attach",
    ) -> None:
        """Find the owners. `scaler` and `scheduler` are found if they are None.

        `given`: the optimizers as the user gave them, wrapped. `taken`: what the user named as `state`. Raises
        AttachError, with the name of the `call`, if several scalers are found.
        """
        record_constructions()
        self._models, self._taken = models, {id(one) for one in taken}
        self.layers = [_layers_of(one, [*given]) for one in optimizers]
        """For each optimizer: itself, then those around and inside it."""
        self._own = {id(layer): index for index, layers in enumerate(self.layers) for layer in layers}
        self.scaler: Any = scaler
        self.schedulers: dict[str, Any] = {}
        self.averages: dict[str, AveragedModel] = {}
        self.ambiguous = ""
        """Class of the schedulers that nothing tells apart; empty if there are none."""
        self._seen: set[int] = set()
        scalers, schedulers = discovery.bystanders([layer for layers in self.layers for layer in layers])
        if scaler is None and scalers:  # it may be of an earlier run, and only the collector finds that out
            del scalers, schedulers
            gc.collect()
            scalers, schedulers = discovery.bystanders([layer for layers in self.layers for layer in layers])
        if scaler is None and len(scalers) > 1:
            raise AttachError(f"rollback: there are {len(scalers)} loss scalers; name the run's: {call}(scaler=...)")
        if scaler is None and scalers:
            self.scaler = scalers[0]
        self._disabled = scaler is not None and not scaler.is_enabled()
        if self._disabled:
            self.scaler = None
        if scheduler is not None:
            self._seen.update(map(id, schedulers))  # the user left them out
            chosen = list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler]
            self._seen.difference_update(map(id, chosen))
            self._add_schedulers(chosen, whatever=True)
        else:
            self._add_schedulers(self._order_schedulers(schedulers))
        if discovery.averages():
            gc.collect()  # for the same reason
        self._add_averages(sorted(discovery.averages(), key=_constants))

    def refresh(self) -> None:
        """Add what was made since."""
        made = _list_made()
        self._add_schedulers([one for one in made if isinstance(one, LRScheduler | ReduceLROnPlateau)])
        self._add_averages([one for one in made if isinstance(one, AveragedModel)])
        if self.scaler is None and not self._disabled:
            self.scaler = self._own_scaler([one for one in made if isinstance(one, GradScaler)])

    def _order_schedulers(self, schedulers: Sequence[Any]) -> list[Any]:
        """Sort schedulers as they were made, as far as that was noted; else by what they were made with."""
        rank = {id(one): index for index, one in enumerate(_list_made())}
        keys = [(self._own.get(id(one.optimizer), -1), type(one).__name__, _constants(one)) for one in schedulers]
        order = sorted(range(len(schedulers)), key=lambda i: (rank.get(id(schedulers[i]), -1), keys[i]))
        unknown = collections.Counter(key for one, key in zip(schedulers, keys, strict=True) if id(one) not in rank)
        self.ambiguous = next((key[1] for key, count in unknown.items() if count > 1), "")
        return [schedulers[index] for index in order]

    def _add_schedulers(self, schedulers: Sequence[Any], *, whatever: bool = False) -> None:
        """Add the schedulers of this run's optimizers; `whatever`: the others too."""
        outermost = {id(one) for one in discovery.outermost([*schedulers, *self.schedulers.values()])}
        for one in schedulers:
            owner = self._own.get(id(getattr(one, "optimizer", None)))
            if id(one) in outermost and id(one) not in self._seen | self._taken and (owner is not None or whatever):
                self._seen.add(id(one))
                prefix = f"optimizers[{owner}]." if owner is not None else ""
                self.schedulers[_free(f"{prefix}{type(one).__name__}", self.schedulers)] = one
        for name in [name for name, one in self.schedulers.items() if id(one) not in outermost]:
            del self.schedulers[name]  # another one was made around it

    def _add_averages(self, averages: Sequence[AveragedModel]) -> None:
        for one in averages:
            if id(one) in self._seen | self._taken or "module" not in vars(one).get("_modules", ()):
                continue
            if any(one is model for model in self._models) or not any(_averages(one, model) for model in self._models):
                continue
            self._seen.add(id(one))
            self.averages[_free("AveragedModel", self.averages)] = one

    def _own_scaler(self, made: Sequence[Any]) -> Any:
        enabled = [one for one in made if vars(one).get("_enabled")]
        if len(enabled) == 1:
            return enabled[0]
        # Of several, take the one that has unscaled gradients of this run's optimizer: its entry lives until
        # `update()`.
        used = [one for one in enabled if self._own.keys() & vars(one).get("_per_optimizer_states", {}).keys()]
        return used[0] if len(used) == 1 else None


def _free(name: str, taken: Mapping[str, object]) -> str:
    number = 0
    while f"{name}[{number}]" in taken:
        number += 1
    return f"{name}[{number}]"


def _constants(one: Any) -> str:
    """Describe an object that was just made by its plain values: the same in a process that is started again."""
    kinds = (int, float, str, bool, list, tuple)
    return repr(sorted((key, repr(value)) for key, value in vars(one).items() if isinstance(value, kinds)))


def _averages(one: AveragedModel, model: nn.Module) -> bool:
    inner, model = unwrap_model(one.module), unwrap_model(model)
    shapes = [(plain_name(name), p.shape) for name, p in inner.named_parameters()]
    return type(inner) is type(model) and shapes == [
        (plain_name(name), p.shape) for name, p in model.named_parameters()
    ]


def _layers_of(optimizer: Any, given: list[Any]) -> list[Any]:
    """Return the watched optimizer, the wrappers given around it, what steps it, and what it steps."""
    layers = [optimizer]
    for outer in given:
        layers += [one for one in _chain(outer, optimizer) if not any(one is other for other in layers)]
    for outer in discovery.holders_of(optimizer):
        layers += [outer] if not any(outer is other for other in layers) else []
    for layer in layers:  # the list grows meanwhile
        inner = [value for value in vars(layer).values() if isinstance(value, Optimizer)]
        layers += [one for one in inner if not any(one is other for other in layers)][:_DEPTH]
    return [layer for layer in layers if not type(layer).__module__.startswith(_DELEGATING)]


def _chain(outer: Any, optimizer: Any) -> Iterator[Any]:
    """Yield the wrappers around the given optimizer; none if they wrap another one."""
    chain: list[Any] = []
    while outer is not optimizer:
        if outer is None or len(chain) == _DEPTH:
            return
        chain.append(outer)
        inner = getattr(outer, "base_optimizer", None)
        outer = inner if discovery.is_optimizer(inner) else getattr(outer, "optimizer", None)
    yield from chain


def check_shown(shown: Mapping[str, Any], what: str, captured: set[int], plain: Container[str] = ()) -> None:
    """Raise StateError if a `state_dict()` shows something that no part of the snapshot holds.

    That is a tensor that is not `captured`, or another value that is not among the `plain` ones, as `repr` writes them.
    What modules return as extra state is held.
    """
    for path, value in list_leaves(shown):
        if not isinstance(value, Tensor) and (value is None or repr(value) in plain or ".params." in path):
            continue  # a group's `params` are numbered
        part = getattr(value, "_local_tensor", value)
        if not isinstance(value, Tensor) or (
            part.numel() and not is_expanded(part) and part.untyped_storage().data_ptr() not in captured
        ):
            raise StateError(f"{what} has state that is not held: {path.lstrip('.')}, which its state_dict() shows")


def list_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of what is not a dictionary or sequence, and not a module's extra state."""
    if path.endswith("_extra_state"):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from list_leaves(item, f"{path}.{key}" if isinstance(key, str | int) else path)
    elif isinstance(value, list | tuple | collections.deque):
        for index, item in enumerate(value):
            yield from list_leaves(item, f"{path}.{index}")
    else:
        yield path, value
