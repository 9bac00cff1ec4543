"""What a run's state is made of: all parts of a snapshot, in the order in which they are put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot_capture import Capture, Part, Stateful
from sentinel.hooks.snapshot_optimizer import Hyperparameters, OptimizerState, Scale
from sentinel.hooks.snapshot_tree import Copies, thawed
from sentinel.hooks.snapshot_weights import Buffers, Weights


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
