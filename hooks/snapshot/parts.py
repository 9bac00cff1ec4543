"""The parts that make up a run's state: all parts of a snapshot, in the order in which they are put back."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.errors import RollbackError, StateError
from sentinel.hooks.core import faults
from sentinel.hooks.snapshot.capture import Capture, Copies, Part, Stateful, thaw_tree
from sentinel.hooks.snapshot.state_owners import Owners, check_shown, list_leaves
from sentinel.hooks.snapshot.training_state import (
    Attributes,
    Buffers,
    Hyperparameters,
    OptimizerState,
    Scale,
    Weights,
    number_things,
    plain_modules,
)
from sentinel.hooks.torch_interop.internals import TorchDispatchMode


class StatefulPart(Part):
    """An object with state_dict and load_state_dict: schedulers, averaged models, what the user names in `state`."""

    late = foreign = True

    def __init__(self, owner: Stateful, name: str) -> None:
        self._owner, self.name = owner, name

    def take(self, capture: Capture) -> tuple[int, Any]:
        """Return the number of its optimizer's groups beside the state."""
        try:
            with _NoCollectives():  # type: ignore[no-untyped-call]
                state = self._owner.state_dict()
        except Exception as error:
            faults.let_through(error)
            raise RollbackError(f"{self.name}: its state_dict() raised {error!r}") from error
        return self._count_groups(), capture.now(state, self.name)

    def give(self, kept: tuple[int, Any], copies: Copies) -> None:
        groups, state = kept
        # A separate copy: load_state_dict may keep what it is given.
        value = thaw_tree(state, None, copies)
        try:
            if now := self._count_groups():
                _append_of_added_groups(value, self._owner.state_dict(), groups, now)
            self._owner.load_state_dict(value)
        except Exception as error:
            faults.let_through(error)
            raise RollbackError(f"{self.name} could not be loaded: {error!r}") from error

    def export_named(self, kept: tuple[int, Any]) -> Any:
        return kept[1]

    def import_named(self, named: Any) -> tuple[int, Any]:
        return self._count_groups(), named  # as many as then: the optimizer's part refuses another number

    def _count_groups(self) -> int:
        """Return the number of groups of the optimizer that a scheduler has; 0: this is no scheduler."""
        groups = getattr(getattr(self._owner, "__dict__", {}).get("optimizer"), "param_groups", None)
        return len(groups) if isinstance(groups, list) else 0


def _append_of_added_groups(kept: Any, live: Any, then: int, now: int) -> None:
    """Append to the lists that had an entry for each of `then` groups or more, such as `base_lrs`, the entries of the
    groups added since, which stay: with fewer entries than groups a scheduler's next step raises, or forgets a rate."""
    if isinstance(kept, dict) and isinstance(live, dict):
        if isinstance(last := kept.get("_last_lr"), list):  # the lists may have been extended later than the groups
            then = len(last)
        for key in kept.keys() & live.keys():
            _append_of_added_groups(kept[key], live[key], then, now)
    elif isinstance(kept, list) and isinstance(live, list):
        if then <= len(kept) < now == len(live):
            kept += live[len(kept) :]
        else:  # schedulers inside another one
            for mine, its in zip(kept, live, strict=False):
                _append_of_added_groups(mine, its, then, now)


class ExtraState(Part):
    """What modules return from `get_extra_state`, as Transformer Engine its FP8 scales."""

    name, foreign = "extra_state", True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models

    def _owners(self) -> dict[str, nn.Module]:
        return {
            f"{prefix}{path}": module
            for prefix, model in number_things(self._models, "model")
            for path, module in plain_modules(model)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def take(self, capture: Capture) -> dict[str, Any]:
        kept = {}
        for name, module in self._owners().items():
            try:
                state = module.get_extra_state()
            except Exception as error:
                faults.let_through(error)
                whose = f"{type(module).__name__} {name}".rstrip()
                raise RollbackError(f"{whose}: its get_extra_state() raised {error!r}") from error
            kept[name] = capture.now(state, f"{name}._extra_state")
        return kept

    def check(self, kept: dict[str, Any]) -> None:
        if gone := sorted(kept.keys() - self._owners().keys()):
            raise RollbackError(f"the model has no module {gone[0]!r} with extra state, which the snapshot has")

    def give(self, kept: dict[str, Any], copies: Copies) -> None:
        owners = self._owners()
        for name, state in kept.items():
            owners[name].set_extra_state(thaw_tree(state, None, copies))


class RngPart(Part):
    """Random number generators: torch's, of the CPU and of the devices in use, Python's and numpy's global ones."""

    name = "random"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]

    def take(self, capture: Capture) -> Any:
        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if (numpy := sys.modules.get("numpy")) is not None:
            states["numpy"] = numpy.random.get_state()
        for device in self._devices:
            states[str(device)] = torch.cuda.get_rng_state(device)
        return capture.now(states, "rng")

    def give(self, kept: Any, copies: Copies) -> None:
        states = thaw_tree(kept, None, copies)
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(states["numpy"])
        for device in self._devices:
            if str(device) in states:  # a run that goes on elsewhere may train on another device
                torch.cuda.set_rng_state(states[str(device)], device)


class RunState:
    """A run's whole state, part by part. Parts are added as schedulers and the like are made."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        owners: Owners,
        state: Mapping[str, Stateful],
    ) -> None:
        self._models, self._optimizers, self._owners, self._state = models, optimizers, owners, state
        self.weights, self.buffers, self._extra = Weights(models, optimizers), Buffers(models), ExtraState(models)
        self._random = RngPart(sorted({p.device for p, _ in self.weights.live().values()}, key=str))
        self._layers = [part for index in range(len(optimizers)) for part in self._parts_of(index)]
        # If something steps after the first optimizer's hook, or swaps weights between the steps, the state at the end
        # of the iteration differs from that at the exit of the step.
        self.settles_late = len(optimizers) > 1 or any(map(_goes_on, optimizers, owners.layers))
        for part in (self.weights, self.buffers, self._extra, self._random, *self._layers):
            part.late = part.late or self.settles_late
        self.parts: list[Part] = []
        self.refresh()

    def refresh(self) -> None:
        """Add the parts of what was made since."""
        self._owners.refresh()
        saved = {f"state[{name!r}]": value for name, value in self._state.items()}
        saved |= self._owners.schedulers | self._owners.averages
        kept = {part.name: part for part in self.parts}
        parts: list[Part] = [self.weights]
        parts += [kept.get(name) or StatefulPart(owner, name) for name, owner in saved.items()]
        parts += [self._extra, self.buffers, *self._layers]
        if self._owners.scaler is not None:
            parts.append(kept.get("scaler") or Scale(self._owners.scaler, self._optimizers))
        self.parts = [*parts, self._random]  # last: nothing draws from the generators after that

    def _parts_of(self, index: int) -> Iterator[Any]:
        """Yield the parts of an optimizer, and of optimizers around and inside it that have state of their own."""
        seen: set[int] = set()
        names: set[str] = set()
        layers = self._owners.layers[index]
        for layer in layers:
            name = f"optimizers[{index}]" + (f".{type(layer).__name__}" if layer is not layers[0] else "")
            while name in names:
                name += "'"
            names.add(name)
            if isinstance(getattr(layer, "state", None), dict) and id(layer.state) not in seen:
                yield OptimizerState(layer, name, self.weights, first=index == 0)
            if isinstance(getattr(layer, "param_groups", None), list) and id(layer.param_groups) not in seen:
                yield Hyperparameters(layer, name)
            seen.update((id(getattr(layer, "state", None)), id(getattr(layer, "param_groups", None))))
            if not type(layer).__module__.startswith("torch."):
                yield Attributes(layer, name, self.weights, layers)

    def read_given(self) -> list[Mapping[str, Any]]:
        """Return the state that each object named in `state` saves.

        Raises StateError if it saves none, or issues a collective: ranks need not take their snapshots at the same
        steps.
        """
        return [_read_state_dict(owner) for owner in self._state.values()]

    def check_models(self) -> None:
        """Raise StateError if PyTorch's own `state_dict()` of a model shows something that no part holds.

        For `attach` only: a sharded model may lay out its parameters again when asked.
        """
        captured, _ = self._list_captured()
        for model in self._models:
            check_shown(_read_state_dict(model), f"the model {type(model).__name__}", captured)

    def check_optimizers(self) -> None:
        """Check the optimizers in the same way. To be called again once they have state, which they make at their first
        step."""
        captured, plain = self._list_captured()
        for layer in (one for layers in self._owners.layers for one in layers):
            own = getattr(type(layer), "state_dict", None)
            if own not in (None, torch.optim.Optimizer.state_dict) and not isinstance(layer, _find_sharded_kinds()):
                check_shown(_read_state_dict(layer), f"the optimizer {type(layer).__name__}", captured, plain)

    def _list_captured(self) -> tuple[set[int], set[str]]:
        """Return the addresses of the tensors that are held, and the other values of the optimizers' parts."""
        capture = Capture()
        self.weights.take(capture), self.buffers.take(capture)
        plain = {repr(value) for part in self._layers for _, value in list_leaves(part.take(capture))}
        sources = [cell.source for cell in capture.stable + capture.volatile if cell.source is not None]
        return {source.untyped_storage().data_ptr() for source in sources}, plain


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises StateError if code inside it sends anything to other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise StateError(f"it issues a collective ({func})")
        return func(*args, **(kwargs or {}))


def _read_state_dict(owner: Any) -> Mapping[str, Any]:
    """Return its `state_dict()`, which is the user's code. Raises StateError if that raises."""
    try:
        with torch.no_grad(), _NoCollectives():  # type: ignore[no-untyped-call]
            shown: Mapping[str, Any] = owner.state_dict()
        return shown
    except Exception as error:
        raise StateError(f"the state of {type(owner).__name__}: its state_dict() raised {error!r}") from error


def _find_sharded_kinds() -> tuple[type, ...]:
    """Return optimizers whose `state_dict()` needs a collective first, and whose state is that of the one inside."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return (module.ZeroRedundancyOptimizer,) if module is not None else ()


def _goes_on(optimizer: Any, layers: Sequence[Any]) -> bool:
    """Whether something writes to weights or state after this optimizer's step, and before the next forward pass."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    outer = [layer for layer in layers[1:] if not any(layer is one for one in inside)]
    # A sharpness-aware optimizer writes before the step of the one that it holds.
    around = any(not hasattr(layer, "second_step") for layer in outer)
    return around or (callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)))


_OLD_SCHEDULER = re.compile(r"schedulers\[\d+\]")
_MOVING = {
    "last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i",
    "_schedulers", "_get_lr_called_within_step", "_is_initial", "verbose",
}  # fmt: skip
"""Attributes that schedulers of torch.optim change as they go."""


def rename_parts(named: Mapping[str, Any], parts: Sequence[Part], schedulers: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return what was read from disk under today's names: older versions numbered schedulers in no order.

    Raises RollbackError if they cannot be matched.
    """
    result = {name: value for name, value in named.items() if not _OLD_SCHEDULER.fullmatch(name)}
    if "extra_state" not in result and any(part.name == "extra_state" for part in parts):
        result["extra_state"] = {}
    for old in named.keys() - result.keys():
        fits = [new for new, one in schedulers.items() if _agree(named[old], one.state_dict()) and new not in result]
        if len(fits) != 1:
            raise RollbackError(
                f"{old} of this snapshot, which an older version wrote, fits {len(fits)} of the run's schedulers "
                f"({', '.join(schedulers)}): go on with the version that wrote it, or from a checkpoint of your own"
            )
        result[fits[0]] = named[old]
    return result


def _agree(saved: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Whether two schedulers were made alike."""
    plain = (int, float, str, list)
    return saved.keys() - _MOVING == live.keys() - _MOVING and all(
        saved[key] == value for key, value in live.items() if key not in _MOVING and isinstance(value, plain)
    )
