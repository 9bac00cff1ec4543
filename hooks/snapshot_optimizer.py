"""The parts of a snapshot that belong to the optimizers, the loss scale among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot_capture import Capture
from sentinel.hooks.snapshot_tree import Copies, thawed
from sentinel.hooks.snapshot_weights import Weights


class OptimizerState:
    """Per-parameter state, of whatever nesting."""

    late = False

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, weights: Weights, *, first: bool) -> None:
        self._optimizer, self.name, self._weights, self._first = optimizer, name, weights, first

    def take(self, capture: Capture) -> Any:
        live = self._optimizer.state
        return capture.later(live, self.name) if self._first else capture.now(live, self.name, judged=True)

    def give(self, kept: Any, copies: Copies) -> None:
        # State that came since then goes, state that went is made again: `thawed` leaves exactly the keys it was given.
        thawed(kept, self._optimizer.state, copies)

    def named(self, kept: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
        names = self._weights.names
        parameters = {names[id(key)]: value for key, value in kept.items() if id(key) in names}
        return parameters, {key: value for key, value in kept.items() if not isinstance(key, Tensor)}

    def found(self, named: tuple[dict[str, Any], dict[Any, Any]]) -> Any:
        parameters, others = named
        live = self._weights.by_name()
        if gone := sorted(parameters.keys() - live.keys()):
            raise RollbackError(f"{self.name} has state of {gone[0]}, which is no parameter of the model")
        return {live[name]: value for name, value in parameters.items()} | others


class Hyperparameters:
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
            renewed = thawed(hyperparameters, _hyperparameters(group), copies)
            group.clear()
            group.update(params=parameters, **renewed)

    def named(self, kept: Any) -> Any:
        return kept

    def found(self, named: Any) -> Any:
        if len(named) != len(self._optimizer.param_groups):
            raise RollbackError(
                f"{self.name}: {len(self._optimizer.param_groups)} groups, the snapshot has {len(named)}"
            )
        return named


class Scale:
    """A GradScaler: its scale, and whether this step's gradients overflowed.

    At the exit of a step the scaler's `update()` is still to come, and it reads the overflow flags of this step. So the
    flags are part of the state: put back with the rest, `update()` does to the restored scale what it did to it then,
    be it now or then that the step was skipped.
    """

    name, late = "scaler", True

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
        self._scaler.load_state_dict(thawed(state, None, copies))
        for key, flag in self._flags().items():
            if key in flags:
                copies.add(flag, flags[key].kept)
            else:  # another optimizer's, which had not been looked at yet when the snapshot was taken
                flag.zero_()

    def named(self, kept: tuple[Any, Any]) -> tuple[Any, Any]:
        return kept

    def found(self, named: tuple[Any, Any]) -> tuple[Any, Any]:
        return named


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
