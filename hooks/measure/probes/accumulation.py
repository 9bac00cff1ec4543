"""Checks how gradients add up over passes and over steps: cleared in between, normalised, and exact.

`ZeroGrad`: at the exit of a step a few gradients are noted, by their address and the version that autograd counts for
each tensor. Clearing one makes it None, another tensor, or its next version; a backward pass adds to it and makes the
next version, too. So a gradient was kept if nothing changed it between the passes. Nothing is read from a device.

`LossReduction`: the graph of a loss is read node by node, from its root: no tensor is touched. Only what is certain is
reported: where the root is a mean over its micro-batch (`MeanBackward0`, `NllLossBackward0` of reduction `mean`, ...),
or leads to such means through additions only. Any product or quotient may be the normalisation, and a graph that cannot
be read (a compiled loss, a function of the user's) may hold one.

`Bf16Accumulation`: now and then, in loops whose steps have enough passes, a few parameters' gradients are sampled as
autograd is about to add them. Their sum is computed in the gradient's own type and in float32 from the same numbers, so
that what others do to the gradient (DDP reduces it, clipping scales it) does not matter. Sums of FSDP2 are sampled
where it makes them (`sharding.coarse_sums`); what ranks lose in the reduction is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import is_passing
from sentinel.hooks.loop.losses import is_scaled
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import tensors
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.sharding import coarse_sums
from sentinel.hooks.torch_interop.tensors import Scalar, is_capturing, meeting_place, scalar, spread

SEARCHED = 16
"""Parameters searched from each end of the model: the first of them that has a gradient is noted."""
ELEMENTS = 64

_Mark = tuple[int, int]


class ZeroGrad(Probe):
    """`gradients_kept`: 1 where the previous step's gradients were still there when this step's were added."""

    relaxed = True

    def __init__(self) -> None:
        self._noted: list[tuple[Any, _Mark]] = []
        """(parameter, mark of its gradient). Parameters outlive the optimizer's hooks, which own this probe."""
        self._armed = self._passed = False
        self._size: Scalar | None = None
        """1 where the kept gradients are not all 0, else 0; None until they are read."""

    def pass_begins(self, roots: Any) -> None:
        for parameter, mark in self._noted:
            if _mark(parameter) != mark:
                self._noted = []
                return
        if self._noted and self._size is None and not tensors.is_capturing():  # a graph would include the reading
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
                # DeepSpeed's stand-ins for partitions have a gradient only in the step, and it clears them itself.
                if isinstance(parameter, torch.Tensor) and (mark := _mark(parameter)) is not None:
                    self._noted.append((parameter, mark))
                    break
        self._armed = bool(self._noted)

    def _measure(self) -> Scalar:
        """Return 1 where any of the kept gradients is not 0. If all are 0, whether they were cleared makes no
        difference and cannot be known. Both ends are read: places that are a stride apart may all belong to one input,
        which is always 0."""
        with torch.no_grad():
            parts = [spread(local(parameter.grad), ELEMENTS).any() for parameter, _ in self._noted]
            device = meeting_place(parts)
            return scalar(torch.stack([part.to(device, non_blocking=True) for part in parts]).any().float())


def _mark(parameter: torch.Tensor) -> _Mark | None:
    """Return a mark of its gradient; None if it has no gradient, or one without plain memory."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    gradient = local(gradient)
    return gradient.data_ptr(), gradient._version


NODES = 8
BLIND_PASSES = 4
"""Least passes taken for micro-batches where no loader was seen: two or three may be the parts of a GAN's loss."""

_MEAN = 1
"""`mean` in torch's enumeration of reductions; `sum` is 2."""
_MEANS = ("MeanBackward", "NllLoss", "MseLoss", "BinaryCrossEntropy", "HuberLoss", "SmoothL1Loss")
_TRANSPARENT = ("AddBackward", "SubBackward", "ToCopyBackward", "ViewBackward", "SqueezeBackward", "CloneBackward")


class LossReduction(Probe):
    """`unnormalised_passes`: backward passes of a step in which no loss is divided; no sample for other steps."""

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
        again = step.passes_before is not None  # a closure, which clears gradients and runs the same batch again
        if self._seen > 1 and all_plain and loaded and not again and not totals.weighted:
            step.values["unnormalised_passes"] = float(self._seen)
        self._seen = self._plain = 0


def is_plain_mean(node: Any, *, scaled: bool) -> bool:
    """Whether a graph certainly begins with only means and sums. `scaled`: its first product is GradScaler's."""
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
"""Least passes in a step: with fewer, little is lost."""
EARLY_SPACING = 4
"""Steps between two samples in the first steps, which are all occasions."""
PARAMETERS = 4
SUM_ELEMENTS = 1024
"""Most elements that are sampled of each parameter."""


class _Sum:
    """Sums of one parameter's sampled gradients, in their own type and in float32. `is_reduced_at_once`: whether the
    present pass's gradient goes straight into a reduction, and so is not added to a sum in bfloat16."""

    def __init__(self, is_reduced_at_once: Callable[[], bool]) -> None:
        self._is_reduced_at_once = is_reduced_at_once
        self.own: torch.Tensor | None = None
        self.exact: torch.Tensor | None = None
        self.broken = self.passes = False
        """Whether it failed, and whether that was a passing error of the machine."""

    def add(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Called before autograd adds a gradient: in the user's backward pass, which must not fail because of us."""
        try:
            (gradient,) = gradients
            if gradient is None or gradient.layout is not torch.strided or self.broken or is_capturing():
                return
            with torch.no_grad():
                self._add(spread(gradient, SUM_ELEMENTS))
        except Exception as error:
            self.broken = self.passes = True
            faults.let_through(error)
            self.passes = is_passing(error)
            if not self.passes:
                faults.swallow("the sums of gradients", "they are not looked at")

    def _add(self, part: torch.Tensor) -> None:
        if self.own is None or self.exact is None:
            if self._is_reduced_at_once():
                return
            self.own, self.exact = part.clone(), part.float()
        else:
            self.own += part
            self.exact += part


def _weakly(one: _Sum) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
    """Return a hook that holds `one` weakly: DDP holds such nodes for longer than the probe lives."""
    ref = weakref.ref(one)

    def call(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if (living := ref()) is not None:
            living.add(gradients)

    return call


class Bf16Accumulation(Probe):
    """`accumulation_error`: L2 norm of what the sums lost, divided by the norm of the sums."""

    relaxed = True

    def __init__(self) -> None:
        self._broken = False
        self._sums: list[_Sum] = []
        self._hooked: list[tuple[Any, Any]] = []
        """(node, handle). The node is held, as autograd would otherwise make another one without the hook."""
        self._due: Layers | None = None
        """The layers to hook into at the first pass of the next step."""

    def disarm(self, step: Step) -> None:
        if self._sums:
            sums = self._sums
            self.capturing()
            if any(one.broken for one in sums):
                self._broken = any(one.broken and not one.passes for one in sums)
            elif step.totals.backwards >= PASSES:
                _tell(step, [(one.own, one.exact) for one in sums if one.own is not None and one.exact is not None])

    def capturing(self) -> None:
        """Release the nodes. A node belongs to the stream on which it was made: autograd would use a held one, and
        refuse to capture it on another stream."""
        for _, handle in self._hooked:
            handle.remove()
        self._sums, self._hooked, self._due = [], [], None

    def arm(self, step: Step) -> None:
        due = (step.seq + 1) % EARLY_SPACING == 0
        if due and not self._broken and step.totals.backwards >= PASSES and step.parameters is not None:
            self._due = step.parameters

    def pass_begins(self, roots: Any) -> None:
        # Only now, as the loop's own graph has the nodes by then: a node made before the forward pass would keep
        # the shape of a parameter that the loop makes smaller meanwhile, and autograd would raise.
        due, self._due = self._due, None
        if due is not None and not is_capturing():
            self._hook(due)

    def _hook(self, known: Layers) -> None:
        coarse = [
            (p, lambda: False)
            for _, p, plain in known.measured
            if plain and p.requires_grad and p.dtype is torch.bfloat16
        ]
        coarse += coarse_sums(known.models) if known.sharded else []
        for parameter, is_reduced_at_once in coarse[:: max(1, len(coarse) // PARAMETERS)][:PARAMETERS]:
            # On the node, not on the parameter: torch.compile guards on a parameter's hooks, and would compile again.
            node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
            self._sums.append(_Sum(is_reduced_at_once))
            self._hooked.append((node, node.register_prehook(_weakly(self._sums[-1]))))


def _tell(step: Step, sums: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not sums:
        return
    device = meeting_place([exact for _, exact in sums])
    lost = torch.cat([(own.float() - exact).flatten().to(device, non_blocking=True) for own, exact in sums])
    whole = torch.cat([exact.flatten().to(device, non_blocking=True) for _, exact in sums])
    norm = torch.linalg.vector_norm(whole).clamp(min=torch.finfo(torch.float32).tiny)
    step.values["accumulation_error"] = scalar(torch.linalg.vector_norm(lost) / norm)
