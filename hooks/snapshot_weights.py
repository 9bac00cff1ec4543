"""The parts of a snapshot that belong to the models: parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot_capture import Capture
from sentinel.hooks.snapshot_tree import Cell, Copies, check_plain, expanded, fits, local, nonfinite, thawed


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


def unwrapped(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put into it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _numbered(things: Sequence[Any], kind: str) -> Iterator[tuple[str, Any]]:
    for index, thing in enumerate(things):
        yield f"{kind}{index + 1}." if index else "", thing
