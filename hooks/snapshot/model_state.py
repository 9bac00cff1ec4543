"""The parts of a snapshot that belong to the models: parameters and buffers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot.capture import Capture, Cell, Copies, Part, check_plain, fits, thaw_tree
from sentinel.hooks.torch_interop.layer_table import local, plain_name, unwrap_model
from sentinel.hooks.torch_interop.tensors import has_nonfinite, is_expanded


class Weights(Part):
    """Parameters of the models and of the optimizers, each once."""

    name = "weights"

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers
        self.names: dict[int, str] = {}
        """As they were when a snapshot was taken last: between the steps FSDP2 puts other parameters into the model."""

    def live(self) -> dict[int, tuple[Tensor, str]]:
        """The parameters that have elements, by identity, so that what is tied comes once. Names are unique, and do
        not tell how the model is wrapped."""
        found: dict[int, tuple[Tensor, str]] = {}
        for prefix, model in number_things(self._models, "model"):
            for name, parameter in unwrap_model(model).named_parameters():
                found.setdefault(id(parameter), (parameter, prefix + plain_name(name)))
        for prefix, optimizer in number_things(self._optimizers, "optimizer"):
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

    def check(self, kept: list[tuple[Tensor, Cell]]) -> None:
        """Raises RollbackError where the model is not what it was."""
        live = self.live()
        for parameter, cell in kept:
            if live.pop(id(parameter), None) is None or not fits(cell, parameter):
                raise RollbackError(f"the model has changed since the snapshot: {cell.name} is another or gone")
        for _, name in live.values():
            raise RollbackError(f"the model has changed since the snapshot: {name} is new")

    def give(self, kept: list[tuple[Tensor, Cell]], copies: Copies) -> None:
        for parameter, cell in kept:
            thaw_tree(cell, parameter, copies)

    def export_named(self, kept: list[tuple[Tensor, Cell]]) -> dict[str, Cell]:
        return {cell.name: cell for _, cell in kept}

    def import_named(self, named: dict[str, Cell]) -> list[tuple[Tensor, Cell]]:
        live = self.by_name()
        return [(live[match_name(name, live, "parameter")], cell) for name, cell in named.items()]


class Buffers(Part):
    """Buffers of the models, persistent or not: BatchNorm's statistics change in the forward pass."""

    name = "buffers"

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._finite: dict[tuple[int, str], bool] = {}
        """Whether each was finite when it was first seen. A mask of -inf is not, whenever `forward` makes it; a
        statistic is, before it is poisoned."""
        for module, key, _, buffer in self.live():
            self._is_judged(module, key, buffer)

    def _is_judged(self, module: nn.Module, key: str, buffer: Tensor) -> bool:
        """Whether a NaN or an infinity in it speaks against a snapshot. What is no part of a checkpoint never does."""
        if key in module._non_persistent_buffers_set:
            return False
        seen = (id(module), key)
        if seen not in self._finite:
            self._finite[seen] = not has_nonfinite(local(buffer))
        return self._finite[seen]

    def live(self) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
        """Owner, key, qualified name and tensor of each buffer that can be written to, those that are shared once.
        Raises RollbackError where one cannot be kept."""
        seen = set()
        for prefix, model in number_things(self._models, "model"):
            for path, module in plain_modules(model):
                for key, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in seen or not buffer.numel() or is_expanded(buffer):
                        continue
                    seen.add(id(buffer))
                    name = prefix + (f"{path}.{key}" if path else key)
                    check_plain(name, buffer)
                    yield module, key, name, buffer

    def take(self, capture: Capture) -> list[tuple[nn.Module, str, Cell]]:
        return [
            (module, key, capture.now(buffer, name, judged=self._is_judged(module, key, buffer)))
            for module, key, name, buffer in self.live()
        ]

    def give(self, kept: list[tuple[nn.Module, str, Cell]], copies: Copies) -> None:
        for module, key, cell in kept:
            # A module that makes its buffer again, a cache that grows, gets a new one of the old shape.
            module._buffers[key] = thaw_tree(cell, module._buffers.get(key), copies)

    def export_named(self, kept: list[tuple[nn.Module, str, Cell]]) -> dict[str, Cell]:
        return {cell.name: cell for _, _, cell in kept}

    def import_named(self, named: dict[str, Cell]) -> list[tuple[nn.Module, str, Cell]]:
        live = {name: (module, key) for module, key, name, _ in self.live()}
        return [
            (*(self._find_made_by_forward(name, cell) or live[match_name(name, live, "buffer")]), cell)
            for name, cell in named.items()
        ]

    def _find_made_by_forward(self, name: str, cell: Cell) -> tuple[nn.Module, str] | None:
        """Where a buffer belongs that the forward pass makes, and has yet to make in this process."""
        path, _, key = plain_name(name).rpartition(".")
        for prefix, model in number_things(self._models, "model"):
            for own, module in plain_modules(model):
                if prefix + own == path and getattr(module, key, None) is None:
                    cell.device = next((p.device for p in unwrap_model(model).parameters()), cell.device)
                    return module, key
        return None


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name as the user wrote it, module) of the user's module and all in it."""
    for path, module in unwrap_model(model).named_modules():
        yield plain_name(f"{path}.").removesuffix("."), module


def match_name(name: str, live: Mapping[str, object], kind: str) -> str:
    """The name of today of what a snapshot calls `name`: older versions left the wrapper of activation checkpointing in
    it, and took a leading `module` out of it, DDP's or not. Raises RollbackError where there is none."""
    plain = plain_name(name)
    if plain in live:
        return plain
    for today in live:
        if _LEADING.sub(r"\1", today, count=1) == plain:
            return today
    raise RollbackError(f"the model has no {kind} {name}, which the snapshot has")


_LEADING = re.compile(r"^(model\d+\.|)module\.")


def number_things(things: Sequence[Any], kind: str) -> Iterator[tuple[str, Any]]:
    """(prefix of names, thing): none for the first one."""
    for index, thing in enumerate(things):
        yield f"{kind}{index + 1}." if index else "", thing
