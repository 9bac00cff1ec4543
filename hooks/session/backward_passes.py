"""Which backward passes count for a step, and what it means if no step follows them.

    a pass that did not reach the model     of another model, which trains in the same process and is not watched
    passes that were thrown away            the loop cleared the gradients and took the step again: it skips a batch
                                            whose norm is out of bounds, or tries again after an exception
    passes that another run stepped on      its loss goes through the model of this run, as a generator's does through
                                            the critic: the gradients it left there are cleared before this run's pass
    passes without a step of this run       another optimizer trains the model now, or `step()` is not called

Gradients are tracked by identity and by the version that autograd counts. Their values are not read, except, on the
host, a few elements of a gradient that was written to. If a loop clears its gradients between the passes of most steps
(SAM, gradients of several tasks or of single samples), all losses count: such a loop adds up the gradients by itself.

When a script goes on with a second optimizer, the first may stay alive because its scheduler holds it. No hook of this
run is called at the second optimizer's steps. But its backward passes are seen, and that no step follows them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sentinel.hooks.torch_interop.internals import exclude_from_tracing
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.tensors import spread

if TYPE_CHECKING:
    from sentinel.hooks.session.session import RunSession

FEW = 4
"""Number of parameters looked at, at even distances: a pass may reach only a part of the model."""
ELEMENTS = 64
STEPS = 16
"""Number of last steps whose majority tells whether the loop clears gradients between its passes."""
RENEWED_EVERY = 256
"""Number of passes after which other parameters are chosen: which of them train may have changed."""

_Mark = tuple[int, int] | None


class PassFilter:
    """Decides which backward passes count, for a run with one optimizer. Called before and after each pass looked
    at."""

    def __init__(self, layers: Layers) -> None:
        self._layers = weakref.ref(layers)  # its parameters must be freed with the optimizer, not with the session
        self._chosen: list[int] = []
        """Places in `layers.measured`. torch refuses to swap a parameter that has a weak reference, as FSDP2 does in
        `model.cpu()`."""
        self._passes = 0
        self._before: list[_Mark] = []
        self._after: list[_Mark] = []
        self._steps: deque[bool] = deque(maxlen=STEPS)
        """For each of the last steps, whether gradients were cleared between its passes."""
        self._cleared = False
        """Whether gradients were cleared between the passes of the present step."""
        self.clearings = 0
        """How often gradients were cleared since the last step."""
        self.reached = False
        """Whether one of the passes since the last step may have reached the model."""
        self.expects_trials = False
        """Whether passes before the first step whose gradients were cleared count as thrown away."""

    def begins(self, *, first: bool, others_stepped: bool = False) -> bool:
        """Note that a pass begins, the `first` of its step or a later one. Returns whether the passes before it do not
        count.

        They do not if they were thrown away, or, with `others_stepped`, if they belong to another run that has stepped
        on them.
        """
        if first:
            self.clearings, self.reached = 0, False
        if first and self._passes:
            self._steps.append(self._cleared)
            self._cleared = False
        self._before = self._marks()
        if not first and others_stepped and not self.reached:
            return True
        if first or not self._was_cleared():
            return False
        if others_stepped:
            return True
        self._cleared = True
        self.clearings += 1
        if not self._steps:
            return self.expects_trials
        return sum(self._steps) * 2 < len(self._steps)

    def end_pass(self) -> bool:
        """Note that the pass is over. Returns whether it may have reached the model."""
        self._passes += 1
        reached = not self._chosen or self._marks() != self._before
        self.reached |= reached
        if not self._chosen or self._passes % RENEWED_EVERY == 0 or any(one is None for one in self._list_chosen()):
            self._choose()
        self._after = self._marks()
        return reached

    def _choose(self) -> None:
        there = [at for at, p in enumerate(self._list_measured()) if isinstance(p, torch.Tensor) and p.grad is not None]
        self._chosen = there[:: -(-len(there) // FEW)] if there else []

    def _list_measured(self) -> list[Any]:
        layers = self._layers()
        return [parameter for _, parameter, _ in layers.measured] if layers is not None else []

    def _list_chosen(self) -> list[torch.Tensor | None]:
        layers = self._layers()
        measured = layers.measured if layers is not None else []
        return [measured[at][1] if at < len(measured) else None for at in self._chosen]

    def _marks(self) -> list[_Mark]:
        return [_mark(parameter) if parameter is not None else None for parameter in self._list_chosen()]

    def _was_cleared(self) -> bool:
        """Whether gradients were cleared since the last pass: removed or, on the host, overwritten with zeros."""
        if not self._chosen or all(mark is None for mark in self._after):
            return False
        if all(mark is None for mark in self._before):
            return True
        return self._before != self._after and all(
            parameter.grad is None or _is_zero(parameter.grad)
            for parameter in self._list_chosen()
            if parameter is not None
        )


def _mark(parameter: torch.Tensor) -> _Mark:
    gradient = parameter.grad  # one that DeepSpeed partitioned exists only inside the step; it is never chosen
    return (id(gradient), local(gradient)._version) if gradient is not None else None


def _is_zero(gradient: Any) -> bool:
    gradient = local(gradient)
    if not gradient.is_cpu or gradient.layout is not torch.strided or not gradient.numel():
        return False
    with torch.no_grad():
        return not bool(spread(gradient, ELEMENTS).any())


LOOK_PASSES = 16
"""Passes without a step after which other optimizers are looked at: most loops accumulate over fewer."""
TELL_PASSES = 64
"""Passes without a step after which the user gets a line, if the gradients are cleared after most of them."""
MANY_PASSES = 1024
"""The same if they are not cleared, or if that is not known."""


class Succession:
    """Finds the optimizer that took over from ours. Called after each backward pass, on the training thread, outside
    steps."""

    def __init__(
        self,
        session: RunSession,
        models: Sequence[nn.Module],
        follow: Callable[[Any, int], None],
    ) -> None:
        """Look for a successor among the optimizers that step.

        `follow` is called with an optimizer that trains the models in place of ours, and with the number of its
        steps that were missed, as far as that is known.
        """
        self._models = [weakref.ref(model) for model in models]
        self._session, self._follow = session, follow
        self._handle: RemovableHandle | None = None
        self._heir: weakref.ref[Any] | None = None
        self._ids: frozenset[int] = frozenset()
        self._steps = self._passes = 0
        self._told = False

    def end_pass(self, steps: int, clearings: int | None) -> None:
        """Note the end of a backward pass, after `steps` steps of ours so far.

        `clearings`: how often the gradients were cleared between the passes since the last step; None: not known.
        """
        if steps != self._steps:
            self._steps, self._passes = steps, 0
            self.close()
        self._passes += 1
        if self._passes < LOOK_PASSES:
            return
        heir = self._heir() if self._heir is not None else None
        if heir is not None:
            self.close()
            self._passes = 0
            self._follow(heir, clearings or 0)
        elif self._handle is None:
            parameters = (p for ref in self._models if (model := ref()) is not None for p in model.parameters())
            self._ids = frozenset(id(p) for p in parameters if p.requires_grad)
            self._handle = register_optimizer_step_pre_hook(exclude_from_tracing(_Look(self)))
        elif not self._told and self._passes >= (TELL_PASSES if 2 * (clearings or 0) > self._passes else MANY_PASSES):
            self._told = True
            self._session.tell_idle(self._passes)

    def close(self) -> None:
        """Stop looking at other optimizers. Not inside a step: PyTorch iterates over such hooks while it calls them."""
        handle, self._handle, self._heir = self._handle, None, None
        if handle is not None:
            handle.remove()
            if self._told and self._steps:
                self._told = False
                self._session.tell_idle(0)

    def stepping(self, optimizer: Any) -> None:
        """Note that an optimizer, any in this process, is about to step."""
        trained = (id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
        if self._heir is None and not self._session.watches(optimizer) and any(trained):
            self._heir = weakref.ref(optimizer)


class _Look:
    """Hook on the steps of all optimizers. PyTorch's own hooks are never released, so this one holds nothing."""

    def __init__(self, succession: Succession) -> None:
        self._succession = weakref.ref(succession)

    def __call__(self, optimizer: Any, *_: Any) -> None:
        succession = self._succession()
        if succession is not None:
            succession.stepping(optimizer)
