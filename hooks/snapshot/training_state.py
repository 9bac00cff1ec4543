"""The parts of a snapshot that belong to models and optimizers: parameters, buffers, state, groups, the loss scale."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
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
        """Names, by id of the parameter, at the last snapshot: between steps FSDP2 puts other parameters into the
        model."""

    def live(self) -> dict[int, tuple[Tensor, str]]:
        """Return the parameters that have elements, by identity, so that tied ones come once.

        Names are unique, and do not depend on how the model is wrapped.
        """
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
        """Return the same parameters, by name."""
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
        """Raise RollbackError if the model is not what it was."""
        live = self.live()
        for parameter, cell in kept:
            if live.pop(id(parameter), None) is None or not fits(cell, parameter):
                raise RollbackError(f"the model has changed since the snapshot: {cell.name} is another or gone")
        for _, name in live.values():
            raise RollbackError(f"the model has changed since the snapshot: {name} is new")

    def give(self, kept: list[tuple[Tensor, Cell]], copies: Copies) -> None:
        for parameter, cell in kept:
            if thaw_tree(cell, parameter, copies) is not parameter:
                raise RollbackError(f"{cell.name} cannot be written to, or shares its memory with another by now")

    def export_named(self, kept: list[tuple[Tensor, Cell]]) -> dict[str, Cell]:
        return {cell.name: cell for _, cell in kept}

    def import_named(self, named: dict[str, Cell]) -> list[tuple[Tensor, Cell]]:
        live = self.by_name()
        found = [(live[match_name(name, live, "parameter")], cell) for name, cell in named.items()]
        for parameter, cell in found:  # which it is copied into, wherever it was when it was written
            cell.device = local(parameter).device
        return found


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
        """Whether a NaN or an infinity in it speaks against a snapshot. In a buffer that no checkpoint has, it never
        does."""
        if key in module._non_persistent_buffers_set:
            return False
        seen = (id(module), key)
        if seen not in self._finite:
            self._finite[seen] = not has_nonfinite(local(buffer))
        return self._finite[seen]

    def live(self) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
        """Yield owner, key, qualified name and tensor of each buffer that can be written to, shared ones once.

        Raises RollbackError if one cannot be kept.
        """
        seen = set()
        for module, key, name, buffer in self._walk():
            if buffer is None or id(buffer) in seen or not buffer.numel() or is_expanded(buffer):
                continue
            seen.add(id(buffer))
            check_plain(name, buffer)
            yield module, key, name, buffer

    def _walk(self) -> Iterator[tuple[nn.Module, str, str, Tensor | None]]:
        """Yield owner, key, qualified name and what is there, for each place of a buffer."""
        for prefix, model in number_things(self._models, "model"):
            for path, module in plain_modules(model):
                for key, buffer in module._buffers.items():
                    yield module, key, prefix + (f"{path}.{key}" if path else key), buffer

    def take(self, capture: Capture) -> list[_Kept]:
        """Note what is at each place: the same cell for a shared buffer, the thing itself where nothing can be written
        to."""
        cells: dict[int, Cell] = {}
        kept: list[_Kept] = []
        for module, key, name, buffer in self._walk():
            if buffer is None or is_expanded(buffer):
                kept.append((module, key, buffer))
                continue
            if id(buffer) not in cells:
                judged = buffer.numel() > 0 and self._is_judged(module, key, buffer)
                cells[id(buffer)] = capture.now(buffer, name, judged=judged)
            kept.append((module, key, cells[id(buffer)]))
        return kept

    def list_younger(self, kept: list[_Kept]) -> list[str]:
        known = {(id(module), key) for module, key, _ in kept}
        return [f"buffer {name}" for module, key, name, _ in self._walk() if (id(module), key) not in known]

    def give(self, kept: list[_Kept], copies: Copies) -> None:
        renewed: dict[int, Any] = {}
        for module, key, value in kept:
            live = module._buffers.get(key)
            # A module that makes its buffer again (a cache that grows) gets a new one of the old shape.
            if id(value) not in renewed:
                renewed[id(value)] = thaw_tree(value, live, copies) if isinstance(value, Cell) else value
            if (buffer := renewed[id(value)]) is not live:
                copies.rewrite(module._buffers, {**module._buffers, key: buffer})

    def export_named(self, kept: list[_Kept]) -> dict[str, Cell]:
        return {value.name: value for *_, value in kept if isinstance(value, Cell) and value.kept.numel()}

    def import_named(self, named: dict[str, Cell]) -> list[_Kept]:
        # Also those that begin empty or expanded, and that the forward pass then makes: a queue, a moving average.
        live = {name: (module, key, buffer) for module, key, name, buffer in self._walk() if buffer is not None}
        found: list[_Kept] = []
        for name, cell in named.items():
            if (owner := self._find_made_by_forward(name, cell)) is not None:
                found.append((*owner, cell))
                continue
            today = match_name(name, live, "buffer")
            module, key, buffer = live[today]
            _check_shape(today, buffer, cell)
            cell.device = local(buffer).device
            found.append((module, key, cell))
            for other, (sharer, its_key, its) in live.items():
                if its is buffer and other not in (today, *named):
                    found.append((sharer, its_key, cell))
        return found

    def _find_made_by_forward(self, name: str, cell: Cell) -> tuple[nn.Module, str] | None:
        """Return the owner and key of a buffer that the forward pass makes, and has yet to make in this process."""
        path, _, key = plain_name(name).rpartition(".")
        for prefix, model in number_things(self._models, "model"):
            for own, module in plain_modules(model):
                if prefix + own == path and getattr(module, key, None) is None:
                    cell.device = next((p.device for p in unwrap_model(model).parameters()), cell.device)
                    return module, key
        return None


_Kept = tuple[nn.Module, str, Cell | Tensor | None]
"""Owner and key of a buffer, and what is there."""


def _check_shape(name: str, live: Tensor, cell: Cell) -> None:
    """Raise RollbackError if the model's buffer is larger than the snapshot's, as one made for a longer context is.

    A smaller one is none: the forward pass may have made it larger since the model was made.
    """
    part, kept = local(live), cell.kept
    if cell.spread is None and part.numel() > kept.numel() and not is_expanded(part):
        now, then = tuple(part.shape), tuple(kept.shape)
        raise RollbackError(f"buffer {name} of the model is {now}, and {then} in the snapshot")


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name as the user wrote it, module) of the user's module and all in it."""
    for path, module in unwrap_model(model).named_modules():
        yield plain_name(f"{path}.").removesuffix("."), module


def match_name(name: str, live: Mapping[str, object], kind: str) -> str:
    """Return today's name for what a snapshot calls `name`. Raises RollbackError if there is none.

    Older versions left the wrapper of activation checkpointing in it, and removed a leading `module`, DDP's or not.
    """
    plain = plain_name(name)
    if plain in live:
        return plain
    for today in live:
        if _LEADING.sub(r"\1", today, count=1) == plain:
            return today
    raise RollbackError(f"the model has no {kind} {name}, which the snapshot has")


_LEADING = re.compile(r"^(model\d+\.|)module\.")


def number_things(things: Sequence[Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yield (prefix of names, thing); the first has an empty prefix."""
    for index, thing in enumerate(things):
        yield f"{kind}{index + 1}." if index else "", thing


class OptimizerState(Part):
    """Per-parameter state of an optimizer, with any nesting."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, weights: Weights, *, first: bool) -> None:
        self._optimizer, self.name, self._weights, self._first = optimizer, name, weights, first

    def take(self, capture: Capture) -> Any:
        live = self._optimizer.state
        return capture.later(live, self.name) if self._first else capture.now(live, self.name, judged=True)

    def give(self, kept: Any, copies: Copies) -> None:
        # State that came since then goes, state that went is made again: `thaw_tree` leaves only the keys it was given.
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


_OF_SCHEDULERS = frozenset(
    {"initial_lr", "start_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum"}
)  # fmt: skip
"""What schedulers of torch.optim add to an optimizer's groups. They may be made after `resume`."""


class Hyperparameters(Part):
    """Options of an optimizer's groups: learning rates, which the schedule writes after the step, and the rest."""

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
            copies.rewrite(group, {"params": parameters, **renewed})

    def import_named(self, named: Any) -> Any:
        if len(named) != len(self._optimizer.param_groups):
            raise RollbackError(
                f"{self.name}: {len(self._optimizer.param_groups)} groups, the snapshot has {len(named)}"
            )
        kept = []
        for group, hyperparameters in zip(self._optimizer.param_groups, named, strict=True):
            live = _hyperparameters(group)
            lacking = sorted(live.keys() - hyperparameters.keys())
            strange = sorted(hyperparameters.keys() - live.keys() - _OF_SCHEDULERS)
            # A newer torch adds options, and a script may drop its own: only both at once is another optimizer.
            if lacking and strange:
                raise RollbackError(
                    f"{self.name}: {type(self._optimizer).__name__} has {lacking[0]!r}, and the snapshot "
                    f"{strange[0]!r} instead: it is of another optimizer"
                )
            kept.append({**{key: live[key] for key in lacking}, **hyperparameters})
        return kept


class Attributes(Part):
    """What a third-party optimizer keeps besides `state` and groups: slow weights, its own counters."""

    def __init__(self, owner: Any, name: str, weights: Weights, layers: Sequence[Any]) -> None:
        self._owner, self.name, self._weights, self._layers = owner, f"{name}.attributes", weights, layers

    def _live(self) -> dict[str, Any]:
        """Return plain values and trees of them, except what belongs to the parameters or another part."""
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
        # Attributes that are live and were not kept were made since, at the first call of something.
        stays = {key: value for key, value in own.items() if key not in live}
        copies.rewrite(own, stays | {key: thaw_tree(value, own.get(key), copies) for key, value in kept.items()})

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
    """Stands on disk for a parameter that is a dictionary key."""

    name: str


def _plain(value: Any) -> bool:
    """Whether it is a number, a text, a tensor that is not a parameter, or a tree of these."""
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
    whether the step was skipped now or then.
    """

    name, late, foreign = "scaler", True, True

    def __init__(self, scaler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaler, self._optimizers = scaler, optimizers

    def _flags(self) -> dict[str, Tensor]:
        flags = {}
        for index, optimizer in enumerate(self._optimizers):
            # Not `[id]`: the dictionary makes an entry for every key that is looked up.
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
