"""The parts of a snapshot that belong to the optimizers, the loss scale among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot.capture import Capture, Copies, Part, thaw_tree
from sentinel.hooks.snapshot.model_state import Weights, match_name


class OptimizerState(Part):
    """Per-parameter state, of whatever nesting."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, weights: Weights, *, first: bool) -> None:
        self._optimizer, self.name, self._weights, self._first = optimizer, name, weights, first

    def take(self, capture: Capture) -> Any:
        live = self._optimizer.state
        return capture.later(live, self.name) if self._first else capture.now(live, self.name, judged=True)

    def give(self, kept: Any, copies: Copies) -> None:
        # State that came since then goes, state that went is made again: `thaw_tree` leaves just the keys it was given.
        thaw_tree(kept, self._optimizer.state, copies)

    def export_named(self, kept: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
        names = self._weights.names
        parameters = {names[id(key)]: value for key, value in kept.items() if id(key) in names}
        return parameters, {key: value for key, value in kept.items() if not isinstance(key, Tensor)}

    def import_named(self, named: tuple[dict[str, Any], dict[Any, Any]]) -> Any:
        parameters, others = named
        live = self._weights.by_name()
        owned = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        found = {live[match_name(name, live, "parameter")]: value for name, value in parameters.items()}
        if strange := [name for name, p in zip(parameters, found, strict=True) if id(p) not in owned]:
            raise RollbackError(
                f"{self.name} ({type(self._optimizer).__name__}) has no parameter {strange[0]}, whose state the "
                "snapshot has: go on with the same groups, and with as many ranks where they share the state out"
            )
        return found | others


class Hyperparameters(Part):
    """Of an optimizer's groups: learning rates, which the schedule writes after the step, and the rest."""

    late = True

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self._optimizer, self.name = optimizer, f"{name}.param_groups"

    def take(self, capture: Capture) -> Any:
        # A learning rate may be a tensor.
        return capture.now([_hyperparameters(group) for group in self._optimizer.param_groups], self.name)

    def give(self, kept: Any, copies: Copies) -> None:
        # Groups that were added since then stay as they are: the loop will not add them a second time.
        for group, hyperparameters in zip(self._optimizer.param_groups, kept, strict=False):
            parameters = group["params"]
            renewed = thaw_tree(hyperparameters, _hyperparameters(group), copies)
            group.clear()
            group.update(params=parameters, **renewed)

    def import_named(self, named: Any) -> Any:
        if len(named) != len(self._optimizer.param_groups):
            raise RollbackError(
                f"{self.name}: {len(self._optimizer.param_groups)} groups, the snapshot has {len(named)}"
            )
        return named


class Attributes(Part):
    """What an optimizer of somebody else's keeps beside `state` and groups: slow weights, counters of its own."""

    def __init__(self, owner: Any, name: str, weights: Weights, layers: Sequence[Any]) -> None:
        self._owner, self.name, self._weights, self._layers = owner, f"{name}.attributes", weights, layers

    def _live(self) -> dict[str, Any]:
        """Plain values and trees of them, but for what is the parameters' or another part's."""
        others = {
            id(getattr(layer, key, None)) for layer in self._layers for key in ("state", "param_groups", "defaults")
        }
        return {
            key: value
            for key, value in vars(self._owner).items()
            if key not in _OF_EVERY_OPTIMIZER and id(value) not in others and _plain(value)
        }

    def take(self, capture: Capture) -> dict[str, Any]:
        return {key: capture.later(value, f"{self.name}.{key}") for key, value in self._live().items()}

    def give(self, kept: dict[str, Any], copies: Copies) -> None:
        own, live = vars(self._owner), self._live()
        for key in live.keys() - kept.keys():
            del own[key]  # made since, at the first call of something
        for key, value in kept.items():
            own[key] = thaw_tree(value, own.get(key), copies)

    def export_named(self, kept: dict[str, Any]) -> dict[str, Any]:
        names = self._weights.names
        return {key: _rename_keys(value, lambda p: OfParameter(names[id(p)]), Tensor) for key, value in kept.items()}

    def import_named(self, named: dict[str, Any]) -> dict[str, Any]:
        live = self._weights.by_name()
        return {
            key: _rename_keys(value, lambda one: live[match_name(one.name, live, "parameter")], OfParameter)
            for key, value in named.items()
        }


_OF_EVERY_OPTIMIZER = frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"_opt_called", "defaults"}


@dataclass(frozen=True)
class OfParameter:
    """Stands on disk for a parameter that is a key."""

    name: str


def _plain(value: Any) -> bool:
    """Whether it is a number, a text, a tensor that is no parameter, or a tree of such."""
    if isinstance(value, Tensor):
        return not isinstance(value, torch.nn.Parameter)
    if isinstance(value, dict | list | tuple | deque):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | complex | str | Enum)


def _rename_keys(value: Any, rename: Callable[[Any], Any], kind: type) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        rename(key) if isinstance(key, kind) else key: _rename_keys(item, rename, kind) for key, item in value.items()
    }


class Scale(Part):
    """A GradScaler: its scale, and whether this step's gradients overflowed.

    At the exit of a step the scaler's `update()` is still to come, and it reads the overflow flags of this step. So the
    flags are part of the state: put back with the rest, `update()` does to the restored scale what it did to it then,
    be it now or then that the step was skipped.
    """

    name, late, foreign = "scaler", True, True

    def __init__(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaler, self._optimizers = scaler, optimizers

    def _flags(self) -> dict[str, Tensor]:
        flags = {}
        for index, optimizer in enumerate(self._optimizers):
            # Not `[id]`: the dictionary makes an entry for every key that is asked for.
            state = getattr(self._scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
            for device, flag in state.get("found_inf_per_device", {}).items():
                flags[f"{index}.{device}"] = flag
        return flags

    def take(self, capture: Capture) -> tuple[Any, Any]:
        return capture.now(self._scaler.state_dict(), "scaler"), capture.now(self._flags(), "scaler.found_inf")

    def give(self, kept: tuple[Any, Any], copies: Copies) -> None:
        state, flags = kept
        self._scaler.load_state_dict(thaw_tree(state, None, copies))
        for key, flag in self._flags().items():
            if key in flags:
                copies.add(flag, flags[key].kept)
            else:  # another optimizer's, which had not been looked at yet when the snapshot was taken
                flag.zero_()


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
