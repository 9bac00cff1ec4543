"""What is lost where gradients of several passes are added up in bfloat16, of 8 bits: a sample is added up in float32
beside it.

Now and then, in loops whose steps have enough passes, a few parameters' gradients are looked at as autograd is about to
add them, before it does. The sum in the gradient's own type is made again from the same numbers, so that what others do
to the gradient (DDP reduces it, clipping scales it) does not matter. Sums of FSDP2 are looked at where it makes them
(`unsharded.py`); what ranks lose in reducing is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.passing_errors import is_passing
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.fsdp import coarse_sums
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.strided_sample import meeting_place, spread
from sentinel.hooks.torch_interop.tensors import is_capturing, scalar

PASSES = 4
"""In a step: with fewer little is lost."""
EARLY_SPACING = 4
"""Of the first steps, which all are occasions."""
PARAMETERS = 4
ELEMENTS = 1024
"""Of each."""


class _Sum:
    """Of one parameter's sampled gradients, in their own type and in float32. `alone`: whether the present pass's
    gradient goes its own way, added to none that is in bfloat16."""

    def __init__(self, alone: Callable[[], bool]) -> None:
        self._alone = alone
        self.own: torch.Tensor | None = None
        self.exact: torch.Tensor | None = None
        self.broken = self.passes = False
        """It failed; for an error of the machine that passes."""

    def add(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Before autograd adds a gradient: within the user's backward pass, which must not fail for us."""
        try:
            (gradient,) = gradients
            if gradient is None or gradient.layout is not torch.strided or self.broken or is_capturing():
                return
            with torch.no_grad():
                self._add(spread(gradient, ELEMENTS))
        except Exception as error:
            self.broken = True
            fault_guard.let_through(error)
            if is_passing(error):
                self.passes = True
            else:
                fault_guard.swallow("the sums of gradients", "they are not looked at")

    def _add(self, part: torch.Tensor) -> None:
        if self.own is None or self.exact is None:
            if self._alone():
                return
            self.own, self.exact = part.clone(), part.float()
        else:
            self.own += part
            self.exact += part


def _weakly(one: _Sum) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
    """DDP holds such nodes for longer than this probe lives."""
    ref = weakref.ref(one)

    def call(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if (living := ref()) is not None:
            living.add(gradients)

    return call


class Bf16Accumulation(Probe):
    """`accumulation_error`: L2 norm of what the sums lost, over that of the sums."""

    relaxed = True

    def __init__(self) -> None:
        self._broken = False
        self._sums: list[_Sum] = []
        self._hooked: list[tuple[Any, Any]] = []
        """(node, handle): autograd makes another node where nobody holds the one that there was."""

    def over(self, step: Step) -> None:
        if self._sums:
            sums = self._sums
            self.capturing()
            if any(one.broken for one in sums):
                self._broken = any(one.broken and not one.passes for one in sums)
            elif step.totals.backwards >= PASSES:
                _tell(step, [(one.own, one.exact) for one in sums if one.own is not None and one.exact is not None])

    def capturing(self) -> None:
        """Let go. A node belongs to the stream on which it was made: autograd, which takes one that is held, refuses to
        capture it on another."""
        for _, handle in self._hooked:
            handle.remove()
        self._sums, self._hooked = [], []

    def arm(self, step: Step) -> None:
        due = (step.seq + 1) % EARLY_SPACING == 0
        if due and not self._broken and step.totals.backwards >= PASSES and step.parameters is not None:
            self._hook(step.parameters)

    def _hook(self, known: Layers) -> None:
        coarse = [
            (p, _never) for _, p, plain in known.measured if plain and p.requires_grad and p.dtype is torch.bfloat16
        ]
        coarse += coarse_sums(known.models) if known.sharded else []
        for parameter, alone in coarse[:: max(1, len(coarse) // PARAMETERS)][:PARAMETERS]:
            # On the node, and not on the parameter: torch.compile guards on a parameter's hooks, and compiles again.
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            self._sums.append(_Sum(alone))
            self._hooked.append((node, node.register_prehook(_weakly(self._sums[-1]))))


def _never() -> bool:
    return False


def _tell(step: Step, sums: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not sums:
        return
    device = meeting_place([exact for _, exact in sums])
    lost = torch.cat([(own.float() - exact).flatten().to(device, non_blocking=True) for own, exact in sums])
    whole = torch.cat([exact.flatten().to(device, non_blocking=True) for _, exact in sums])
    norm = torch.linalg.vector_norm(whole).clamp(min=torch.finfo(torch.float32).tiny)
    step.values["accumulation_error"] = scalar(torch.linalg.vector_norm(lost) / norm)
