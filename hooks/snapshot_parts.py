"""What a run's state is made of, and how each part is taken and put back.

A part takes itself with `Capture.later` (tensors that change only inside a step of the first optimizer, at whose exit
snapshots are taken: they may be copied while the next forward pass runs) or `Capture.now` (all else), and puts back
what it took.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot_tree import Cell, Copies, check_plain, expanded, fits, frozen, local, nonfinite, thawed


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

    @property
    def name(self) -> str:
        """Unique in the run, and the same when it is started again."""

    @property
    def late(self) -> bool:
        """Whether the loop still changes it after the step: schedulers, the scaler, an EMA. A rollback puts it back as
        it was at the exit of the step, since the loop will do to it what it did then; a run that is started again
        begins with the next iteration, and needs it as it was at the end of this one."""

    def take(self, capture: Capture) -> Any:
        """What is to be kept, with cells for the tensors."""

    def give(self, kept: Any, copies: Copies) -> None:
        """Put it back. Tensors that keep their storage are only planned in `copies`."""

    def named(self, kept: Any) -> Any:
        """What was taken, by names: nothing in it belongs to this process."""

    def found(self, named: Any) -> Any:
        """The reverse, in the process that goes on. Raises RollbackError where something has no such name here."""


class Weights:
    """Parameters of the models and of the optimizers, each once."""

    name, late = "weights", False

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers
        self.names: dict[int, str] = {}
        """As they were when a snapshot was taken last: between the steps FSDP2 puts other parameters into the model."""

    def live(self) -> dict[int, tuple[Tensor, str]]:
        """The parameters that have elements, by identity, so that what is tied comes once. Names are unique, and do
        not tell how the model is wrapped."""
        found: dict[int, tuple[Tensor, str]] = {}
        for prefix, model in _numbered(self._models, "model"):
            for name, parameter in model.named_parameters():
                found.setdefault(id(parameter), (parameter, prefix + unwrapped(name)))
        for prefix, optimizer in _numbered(self._optimizers, "optimizer"):
            for index, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    found.setdefault(id(parameter), (parameter, f"{prefix}param_groups[{index}][{position}]"))
        return {key: (parameter, name) for key, (parameter, name) in found.items() if parameter.numel()}

    def by_name(self) -> dict[str, Tensor]:
        """The same, by name."""
        return {name: parameter for parameter, name in self.live().values()}

    def take(self, capture: Capture) -> list[tuple[Tensor, Cell]]:
        stepped_later = {
            id(parameter)
            for optimizer in self._optimizers[1:]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        kept, live = [], self.live()
        self.names = {key: name for key, (_, name) in live.items()}
        for key, (parameter, name) in live.items():
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

    def named(self, kept: list[tuple[Tensor, Cell]]) -> dict[str, Cell]:
        return {cell.name: cell for _, cell in kept}

    def found(self, named: dict[str, Cell]) -> list[tuple[Tensor, Cell]]:
        live = self.by_name()
        if gone := sorted(named.keys() - live.keys()):
            raise RollbackError(f"the model has no parameter {gone[0]}, which the snapshot has")
        return [(live[name], cell) for name, cell in named.items()]


class Buffers:
    """Buffers of the models, persistent or not: BatchNorm's statistics change in the forward pass."""

    name, late = "buffers", False

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        # Masks of -inf, say. Taken before the first step, so that a poisoned statistic is not among them.
        self._infinite = {(id(module), key) for module, key, _, buffer in self.live() if nonfinite(local(buffer))}

    def live(self) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
        """Owner, key, qualified name and tensor of each buffer that can be written to, those that are shared once.
        Raises RollbackError where one cannot be kept."""
        seen = set()
        for prefix, model in _numbered(self._models, "model"):
            for path, module in model.named_modules():
                for key, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in seen or not buffer.numel() or expanded(buffer):
                        continue
                    seen.add(id(buffer))
                    name = prefix + unwrapped(f"{path}.{key}")
                    check_plain(name, buffer)
                    yield module, key, name, buffer

    def take(self, capture: Capture) -> list[tuple[nn.Module, str, Cell]]:
        return [
            (module, key, capture.now(buffer, name, judged=(id(module), key) not in self._infinite))
            for module, key, name, buffer in self.live()
        ]

    def give(self, kept: list[tuple[nn.Module, str, Cell]], copies: Copies) -> None:
        for module, key, cell in kept:
            # A module that makes its buffer anew, a cache that grows, gets a new one of the old shape.
            module._buffers[key] = thawed(cell, module._buffers.get(key), copies)

    def named(self, kept: list[tuple[nn.Module, str, Cell]]) -> dict[str, Cell]:
        return {cell.name: cell for _, _, cell in kept}

    def found(self, named: dict[str, Cell]) -> list[tuple[nn.Module, str, Cell]]:
        live = {name: (module, key) for module, key, name, _ in self.live()}
        if gone := sorted(named.keys() - live.keys()):
            raise RollbackError(f"the model has no buffer {gone[0]}, which the snapshot has")
        return [(*live[name], cell) for name, cell in named.items()]


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

    def named(self, kept: tuple[Any, Any]) -> tuple[Any, Any]:
        return kept

    def found(self, named: tuple[Any, Any]) -> tuple[Any, Any]:
        return named


class Saved:
    """Anything with state_dict and load_state_dict: schedulers, and what the user names in `state`."""

    late = True

    def __init__(self, owner: Stateful, name: str) -> None:
        self._owner, self.name = owner, name

    def take(self, capture: Capture) -> Any:
        return capture.now(self._owner.state_dict(), self.name)

    def give(self, kept: Any, copies: Copies) -> None:
        # A copy of its own: load_state_dict may keep what it is given.
        value = thawed(kept, None, copies)
        try:
            self._owner.load_state_dict(value)
        except Exception as error:
            raise RollbackError(f"{self.name} could not be loaded: {error!r}") from error

    def named(self, kept: Any) -> Any:
        return kept

    def found(self, named: Any) -> Any:
        return named


class Randomness:
    """Random number generators: torch's, of the CPU and of the devices in use, Python's and numpy's global ones."""

    name, late = "random", False

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
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(states["numpy"])
        for device in self._devices:
            if str(device) in states:  # one that goes on elsewhere may train on another device
                torch.cuda.set_rng_state(states[str(device)], device)

    def named(self, kept: Any) -> Any:
        return kept

    def found(self, named: Any) -> Any:
        return named


def parts_of(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    state: Mapping[str, Stateful],
    schedulers: Sequence[Stateful],
    scaler: Any,
) -> list[Part]:
    """The run's whole state, in the order in which it is put back: first what checks before it touches anything, then
    what runs code of the user's, which may raise; last the generators, so that nothing draws from them after that."""
    weights = Weights(models, optimizers)
    parts: list[Part] = [weights]
    parts += [Saved(value, f"state[{name!r}]") for name, value in state.items()]
    parts += [Saved(scheduler, f"schedulers[{index}]") for index, scheduler in enumerate(schedulers)]
    parts.append(Buffers(models))
    for index, optimizer in enumerate(optimizers):
        name = f"optimizers[{index}]"
        parts += [OptimizerState(optimizer, name, weights, first=index == 0), Hyperparameters(optimizer, name)]
    if scaler is not None and scaler.is_enabled():
        parts.append(Scale(scaler, optimizers))
    devices = {parameter.device for parameter, _ in weights.live().values()}
    parts.append(Randomness(sorted(devices, key=str)))
    return parts


def unwrapped(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _numbered(things: Sequence[Any], kind: str) -> Iterator[tuple[str, Any]]:
    for index, thing in enumerate(things):
        yield f"{kind}{index + 1}." if index else "", thing


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
