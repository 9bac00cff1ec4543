"""Notices that the watched optimizer steps no more while its model is trained, and by which other one.

Where a script goes on with a second optimizer, the first may live on: its scheduler holds it. Nothing of ours is called
at the second one's steps then. But backward passes are seen, and that no step comes after them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sentinel.hooks.torch_interop.dynamo import exclude_from_tracing

LOOK_PASSES = 16
"""Without a step, before other optimizers are looked at: most loops accumulate the gradients of fewer."""
TELL_PASSES = 64
"""Without a step, before that is told, where the gradients are cleared after most of them."""
MANY_PASSES = 1024
"""The same where they are not, or where that is not known."""


class Succession:
    """Asked after each backward pass of the run, on the training thread, outside of any step."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        watches: Callable[[object], bool],
        hand_over: Callable[[Any, int], None],
        tell: Callable[[int], None],
    ) -> None:
        """`hand_over` is called with an optimizer that trains the models in place of ours, and how many of its steps
        were missed, as far as that is known; `tell` once with the number of passes after which there was no step of
        any, and with 0 where one came after all."""
        self._models = [weakref.ref(model) for model in models]
        self._watches, self._hand_over, self._tell = watches, hand_over, tell
        self._handle: RemovableHandle | None = None
        self._heir: weakref.ref[Any] | None = None
        self._ids: frozenset[int] = frozenset()
        self._steps = self._passes = 0
        self._told = False

    def end_pass(self, steps: int, clearings: int | None) -> None:
        """A backward pass is over, `steps` of ours were made so far. `clearings`: how often the gradients were cleared
        between the passes since the last step; None: not known."""
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
            self._hand_over(heir, clearings or 0)
        elif self._handle is None:
            parameters = (p for ref in self._models if (model := ref()) is not None for p in model.parameters())
            self._ids = frozenset(id(p) for p in parameters if p.requires_grad)
            self._handle = register_optimizer_step_pre_hook(exclude_from_tracing(_Look(self)))
        elif not self._told and self._passes >= (TELL_PASSES if 2 * (clearings or 0) > self._passes else MANY_PASSES):
            self._told = True
            self._tell(self._passes)

    def close(self) -> None:
        """Look at no other optimizer. Not inside a step: PyTorch iterates over such hooks while it calls them."""
        handle, self._handle, self._heir = self._handle, None, None
        if handle is not None:
            handle.remove()
            if self._told and self._steps:
                self._told = False
                self._tell(0)

    def stepping(self, optimizer: Any) -> None:
        """An optimizer, any in this process, is about to step."""
        trained = (id(p) in self._ids for group in optimizer.param_groups for p in group["params"])
        if self._heir is None and not self._watches(optimizer) and any(trained):
            self._heir = weakref.ref(optimizer)


class _Look:
    """Hook of all optimizers. Hooks of PyTorch's own are never let go of: this one holds nothing."""

    def __init__(self, succession: Succession) -> None:
        self._succession = weakref.ref(succession)

    def __call__(self, optimizer: Any, *_: Any) -> None:
        succession = self._succession()
        if succession is not None:
            succession.stepping(optimizer)
