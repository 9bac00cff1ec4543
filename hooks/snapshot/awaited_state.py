"""State that `resume` read for schedulers, a loss scaler or averaged models that the script makes only after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from sentinel.hooks.core import fault_guard
from sentinel.hooks.snapshot.parts import RunState
from sentinel.hooks.snapshot.snapshot import put_back
from sentinel.hooks.torch_interop.dynamo import exclude_from_tracing

_MADE_LATER = re.compile(r"optimizers\[\d+\]\.\w+\[\d+\]|AveragedModel\[\d+\]|scaler")


def may_come(name: str) -> bool:
    """Whether the part of this name may be made after `resume`."""
    return _MADE_LATER.fullmatch(name) is not None


class AwaitedState:
    """Gives it to its owners at the first forward pass that finds them there, or at the first step; then it is gone.

    Before a forward pass, since a loss is scaled right after it. A scheduler writes the learning rates as it is made:
    the groups are put back once more.
    """

    def __init__(self, run: RunState, named: Mapping[str, Any], awaited: Sequence[str]) -> None:
        self._run, self._named, self._awaited = run, named, set(awaited)
        self._handles: list[Any] = []

    def watch(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Begin to wait."""
        before_forward, before_step = (
            exclude_from_tracing(partial(self._before_forward)),
            exclude_from_tracing(partial(self._before_step)),
        )
        hooked = [model for model in models if not isinstance(model, torch.jit.ScriptModule)]
        self._handles = [model.register_forward_pre_hook(before_forward) for model in hooked]
        self._handles.append(optimizer.register_step_pre_hook(before_step))

    def _before_forward(self, *_: object) -> None:
        with fault_guard.swallow_faults("giving back what was read from the snapshot", "without it"):
            self._give()

    def _before_step(self, *_: object) -> None:
        with fault_guard.swallow_faults("giving back what was read from the snapshot", "without it"):
            self._give()
            if self._awaited:
                fault_guard.say(
                    f"the snapshot has {', '.join(sorted(self._awaited))}, which this run has not made by its first "
                    "step: make it before, or give it to resume()"
                )
            self._end()

    def _give(self) -> None:
        self._run.refresh()
        parts = [part for part in self._run.parts if part.name in self._awaited]
        if not parts:
            return
        groups = [part for part in self._run.parts if part.name.endswith(".param_groups")]
        self._awaited -= {part.name for part in parts}
        put_back(
            [*parts, *groups], {part.name: part.import_named(self._named[part.name]) for part in (*parts, *groups)}
        )
        if not self._awaited:
            self._end()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._named = {}
