"""How the gradients of several passes, and of several steps, add up: cleared in between, normalised, and exact.

`ZeroGrad`: at the exit of a step a few gradients are noted, by the address and the version that autograd counts for
each tensor. Clearing one makes it None, another tensor, or the next version of it; a backward pass adds to it and makes
the next version too. So a gradient was kept if nothing changed it between the passes. Nothing is read from a device.

`LossReduction`: the graph of a loss is read from its root on, node by node: no tensor is touched. Only what is sure is
reported: where the root is a mean over its micro-batch (`MeanBackward0`, `NllLossBackward0` of reduction `mean`, ...),
with nothing but additions before it. Any product or quotient may be the normalisation, and a graph that cannot be read
(a compiled loss, a function of the user's) may hold one.

`Bf16Accumulation`: now and then, in loops whose steps have enough passes, a few parameters' gradients are looked at as
autograd is about to add them. The sum in the gradient's own type is made again from the same numbers, with one in
float32 beside it, so that what others do to the gradient (DDP reduces it, clipping scales it) does not matter. Sums of
FSDP2 are looked at where it makes them (`sharding.coarse_sums`); what ranks lose in reducing is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sentinel.hooks.core import fault_guard
from sentinel.hooks.core.unseen import is_passing
from sentinel.hooks.loop.losses import is_scaled
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import tensors
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.sharding import coarse_sums
from sentinel.hooks.torch_interop.tensors import Scalar, is_capturing, meeting_place, scalar, spread

SEARCHED = 16
"""Parameters from each end of the model: the first of them that has a gradient is noted."""
ELEMENTS = 64

_Mark = tuple[int, int]


class ZeroGrad(Probe):
    """`gradients_kept`: 1 where the gradients of the step before were still there when this one's were added."""

    relaxed = True

    def __init__(self) -> None:
        self._noted: list[tuple[Any, _Mark]] = []
        """(parameter, mark of its gradient). Parameters outlive the optimizer's hooks, which hold this."""
        self._armed = self._passed = False
        self._size: Scalar | None = None
        """Whether there is anything in what is still there, once it was looked at."""

    def pass_begins(self, roots: Any) -> None:
        for parameter, mark in self._noted:
            if _mark(parameter) != mark:
                self._noted = []
                return
        if self._noted and self._size is None and not tensors.is_capturing():  # or the graph would look at it, too
            self._size = self._measure()

    def pass_ended(self) -> None:
        self._passed = True
        if self._noted:
            marks = [(parameter, _mark(parameter)) for parameter, _ in self._noted]
            self._noted = [(parameter, mark) for parameter, mark in marks if mark is not None]

    def disarm(self, step: Step) -> None:
        if self._armed and self._passed:
            kept = self._size if self._noted else None
            step.look_again = kept is not None
            step.values["gradients_kept"] = 0.0 if kept is None else kept
        self._armed, self._passed, self._noted = False, False, []

    def arm(self, step: Step) -> None:
        self._passed, self._size = False, None
        if step.parameters is not None:
            self._note(step.parameters.measured)

    def _note(self, measured: list[tuple[int, torch.Tensor, bool]]) -> None:
        for end in (measured[:SEARCHED], measured[: -SEARCHED - 1 : -1]):
            for _, parameter, _ in end:
                # DeepSpeed's stand-ins for partitions have a gradient in the step alone, and it clears them itself.
                if isinstance(parameter, torch.Tensor) and (mark := _mark(parameter)) is not None:
                    self._noted.append((parameter, mark))
                    break
        self._armed = bool(self._noted)

    def _measure(self) -> Scalar:
        """Where all of it is 0 it makes no difference whether it was cleared, and cannot be told. Both ends are looked
        at: places that are a stride apart may all belong to one input, which is always 0."""
        with torch.no_grad():
            parts = [spread(local(parameter.grad), ELEMENTS).any() for parameter, _ in self._noted]
            device = meeting_place(parts)
            return scalar(torch.stack([part.to(device, non_blocking=True) for part in parts]).any().float())


def _mark(parameter: torch.Tensor) -> _Mark | None:
    """A mark of its gradient; None if there is no gradient, or it has no plain memory."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    gradient = local(gradient)
    return gradient.data_ptr(), gradient._version


NODES = 8
BLIND_PASSES = 4
"""Where no loader was seen, passes that are taken for micro-batches: two or three may be the halves of a GAN's loss."""

_MEAN = 1
"""Of torch's enumeration of reductions; `sum` is 2."""
_MEANS = ("MeanBackward", "NllLoss", "MseLoss", "BinaryCrossEntropy", "HuberLoss", "SmoothL1Loss")
_TRANSPARENT = ("AddBackward", "SubBackward", "ToCopyBackward", "ViewBackward", "SqueezeBackward", "CloneBackward")


class LossReduction(Probe):
    """`unnormalised_passes`: backward passes of a step, where no loss of them is divided; elsewhere none."""

    relaxed = True

    def __init__(self) -> None:
        self._seen = self._plain = 0

    def pass_begins(self, roots: Any) -> None:
        self._seen += 1
        if self._plain == self._seen - 1 and isinstance(roots, torch.Tensor):
            self._plain += is_plain_mean(roots.grad_fn, scaled=is_scaled(roots))

    def disarm(self, step: Step) -> None:
        totals = step.totals
        all_plain = totals.backwards == self._seen == self._plain
        loaded = totals.batches == self._seen if totals.batches else totals.forwards == self._seen >= BLIND_PASSES
        again = step.passes_before is not None  # a closure, which clears the gradients and runs the same batch again
        if self._seen > 1 and all_plain and loaded and not again and not totals.weighted:
            step.values["unnormalised_passes"] = float(self._seen)
        self._seen = self._plain = 0


def is_plain_mean(node: Any, *, scaled: bool) -> bool:
    """Whether a graph is known to begin with means and sums alone. `scaled`: its first product is GradScaler's."""
    if scaled and node is not None and node.name().startswith("MulBackward"):
        node = node.next_functions[0][0]
    waiting = [node]
    for _ in range(NODES):
        if not waiting:
            return True
        node = waiting.pop()
        if node is None:  # a constant
            continue
        name = node.name()
        if name.startswith(_TRANSPARENT):
            waiting += [below for below, _ in node.next_functions]
        elif not name.startswith(_MEANS) or getattr(node, "_saved_reduction", _MEAN) != _MEAN:
            return False
    return not waiting


PASSES = 4
"""In a step: with fewer little is lost."""
EARLY_SPACING = 4
"""Of the first steps, which all are occasions."""
PARAMETERS = 4
SUM_ELEMENTS = 1024
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
                self._add(spread(gradient, SUM_ELEMENTS))
        except Exception as error:
            self.broken = self.passes = True
            fault_guard.let_through(error)
            self.passes = is_passing(error)
            if not self.passes:
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
        """(node, handle). The node is held, as autograd would otherwise make a new one without the hook."""

    def disarm(self, step: Step) -> None:
        if self._sums:
            sums = self._sums
            self.capturing()
            if any(one.broken for one in sums):
                self._broken = any(one.broken and not one.passes for one in sums)
            elif step.totals.backwards >= PASSES:
                _tell(step, [(one.own, one.exact) for one in sums if one.own is not None and one.exact is not None])

    def capturing(self) -> None:
        """Let the nodes go. A node belongs to the stream on which it was made: autograd would use a held one, and
        refuse to capture it on another stream."""
        for _, handle in self._hooked:
            handle.remove()
        self._sums, self._hooked = [], []

    def arm(self, step: Step) -> None:
        due = (step.seq + 1) % EARLY_SPACING == 0
        if due and not self._broken and step.totals.backwards >= PASSES and step.parameters is not None:
            self._hook(step.parameters)

    def _hook(self, known: Layers) -> None:
        coarse = [
            (p, lambda: False)
            for _, p, plain in known.measured
            if plain and p.requires_grad and p.dtype is torch.bfloat16
        ]
        coarse += coarse_sums(known.models) if known.sharded else []
        for parameter, alone in coarse[:: max(1, len(coarse) // PARAMETERS)][:PARAMETERS]:
            # On the node, and not on the parameter: torch.compile guards on a parameter's hooks, and compiles again.
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            self._sums.append(_Sum(alone))
            self._hooked.append((node, node.register_prehook(_weakly(self._sums[-1]))))


def _tell(step: Step, sums: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not sums:
        return
    device = meeting_place([exact for _, exact in sums])
    lost = torch.cat([(own.float() - exact).flatten().to(device, non_blocking=True) for own, exact in sums])
    whole = torch.cat([exact.flatten().to(device, non_blocking=True) for _, exact in sums])
    norm = torch.linalg.vector_norm(whole).clamp(min=torch.finfo(torch.float32).tiny)
    step.values["accumulation_error"] = scalar(torch.linalg.vector_norm(lost) / norm)
