"""What a run's state is made of, and how each part is taken and put back.

A part takes itself with `Capture.later` (tensors that change only inside a step of the first optimizer, at whose exit
snapshots are taken: they may be copied while the next forward pass runs) or `Capture.now` (all else), and puts back
what it took.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot_tree import Cell, Copies, fits, frozen, local, nonfinite, thawed


class Stateful(Protocol):
    """Anything with torch's way to save itself."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Capture:
    """Gathers the cells of one snapshot."""

    def __init__(self) -> None:
        self.stable: list[Cell] = []
        self.volatile: list[Cell] = []

    def later(self, value: Any, name: str) -> Any:
        """Freeze what changes only inside a step."""
        return frozen(value, name, lambda path, tensor: self._cell(self.stable, path, tensor, judged=True))

    def now(self, value: Any, name: str, *, judged: bool = False) -> Any:
        """Freeze what may change as soon as the step is over."""
        return frozen(value, name, lambda path, tensor: self._cell(self.volatile, path, tensor, judged=judged))

    @staticmethod
    def _cell(cells: list[Cell], name: str, tensor: Tensor, *, judged: bool) -> Cell:
        cells.append(Cell(name, tensor, judged=judged))
        return cells[-1]


class Part(Protocol):
    """One part of the state."""

    def take(self, capture: Capture) -> Any:
        """What is to be kept, with cells for the tensors."""

    def give(self, kept: Any, copies: Copies) -> None:
        """Put it back. Tensors that keep their storage are only planned in `copies`."""


class Weights:
    """Parameters of the models and of the optimizers, each once."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers

    def live(self) -> dict[int, tuple[Tensor, str]]:
        """The parameters that have elements, by identity, so that what is tied comes once."""
        found: dict[int, tuple[Tensor, str]] = {}
        for model in self._models:
            for name, parameter in model.named_parameters():
                found.setdefault(id(parameter), (parameter, name))
        for optimizer in self._optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    found.setdefault(id(parameter), (parameter, f"param_groups[{index}][{position}]"))
        return {key: (parameter, name) for key, (parameter, name) in found.items() if parameter.numel()}

    def take(self, capture: Capture) -> list[tuple[Tensor, Cell]]:
        stepped_later = {
            id(parameter)
            for optimizer in self._optimizers[1:]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        kept = []
        for key, (parameter, name) in self.live().items():
            stable = key not in stepped_later
            cell = capture.later(parameter, name) if stable else capture.now(parameter, name, judged=True)
            kept.append((parameter, cell))
        return kept

    def give(self, kept: list[tuple[Tensor, Cell]], copies: Copies) -> None:
        """Raises RollbackError, before anything is touched, where the model is not what it was."""
        live = self.live()
        for parameter, cell in kept:
            if live.pop(id(parameter), None) is None or not fits(cell, parameter):
                raise RollbackError(f"the model has changed since the snapshot: {cell.name} is another or gone")
        for _, name in live.values():
            raise RollbackError(f"the model has changed since the snapshot: {name} is new")
        for parameter, cell in kept:
            thawed(cell, parameter, copies)


class Buffers:
    """Buffers of the models, persistent or not: BatchNorm's statistics change in the forward pass."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        # Masks of -inf, say. Taken before the first step, so that a poisoned statistic is not among them.
        self._infinite = {(id(module), key) for module, key, _, buffer in self.live() if nonfinite(local(buffer))}

    def live(self) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
        """Owner, key, qualified name and tensor of each buffer that can be written to, those that are shared once."""
        seen = set()
        for model in self._models:
            for path, module in model.named_modules():
                for key, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in seen or not buffer.numel() or _expanded(buffer):
                        continue
                    seen.add(id(buffer))
                    yield module, key, f"{path}.{key}", buffer

    def take(self, capture: Capture) -> list[tuple[nn.Module, str, Cell]]:
        return [
            (module, key, capture.now(buffer, name, judged=(id(module), key) not in self._infinite))
            for module, key, name, buffer in self.live()
        ]

    def give(self, kept: list[tuple[nn.Module, str, Cell]], copies: Copies) -> None:
        for module, key, cell in kept:
            # A module that makes its buffer anew, a cache that grows, gets a new one of the old shape.
            module._buffers[key] = thawed(cell, module._buffers.get(key), copies)


class OptimizerState:
    """Per-parameter state, of whatever nesting, and the hyper-parameters of the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, *, first: bool) -> None:
        self._optimizer, self._name, self._first = optimizer, name, first

    def take(self, capture: Capture) -> tuple[Any, Any]:
        live = self._optimizer.state
        state = capture.later(live, self._name) if self._first else capture.now(live, self._name, judged=True)
        groups = [_hyperparameters(group) for group in self._optimizer.param_groups]
        # A learning rate may be a tensor, which the schedule writes to after the step.
        return state, capture.now(groups, f"{self._name}.param_groups")

    def give(self, kept: tuple[Any, Any], copies: Copies) -> None:
        state, groups = kept
        # State that came since then goes, state that went is made again: `thawed` leaves exactly the keys it was given.
        thawed(state, self._optimizer.state, copies)
        # Groups that were added since then stay as they are: the loop will not add them a second time.
        for group, hyperparameters in zip(self._optimizer.param_groups, groups, strict=False):
            parameters = group["params"]
            renewed = thawed(hyperparameters, _hyperparameters(group), copies)
            group.clear()
            group.update(params=parameters, **renewed)


class Scale:
    """A GradScaler: its scale, and whether this step's gradients overflowed.

    At the exit of a step the scaler's `update()` is still to come, and it reads the overflow flags of this step. So the
    flags are part of the state: put back with the rest, `update()` does to the restored scale what it did to it then,
    be it now or then that the step was skipped.
    """

    def __init__(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaler, self._optimizers = scaler, optimizers

    def _flags(self) -> dict[str, Tensor]:
        flags = {}
        for index, optimizer in enumerate(self._optimizers):
            # Not `[id]`: the dictionary makes an entry for whoever asks.
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


class Saved:
    """Anything with state_dict and load_state_dict: schedulers, and what the user names in `state`."""

    def __init__(self, owner: Stateful, name: str) -> None:
        self._owner, self._name = owner, name

    def take(self, capture: Capture) -> Any:
        return capture.now(self._owner.state_dict(), self._name)

    def give(self, kept: Any, copies: Copies) -> None:
        # A copy of its own: load_state_dict may keep what it is given.
        value = thawed(kept, None, copies)
        try:
            self._owner.load_state_dict(value)
        except Exception as error:
            raise RollbackError(f"{self._name} could not be loaded: {error!r}") from error


class Randomness:
    """Random number generators: torch's, of the CPU and of the devices in use, Python's and numpy's global ones."""

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
        states = thawed(kept, None, copies)
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if "numpy" in states:
            sys.modules["numpy"].random.set_state(states["numpy"])
        for device in self._devices:
            torch.cuda.set_rng_state(states[str(device)], device)


def _expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory: nobody can write to it, so it is always what it was."""
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
