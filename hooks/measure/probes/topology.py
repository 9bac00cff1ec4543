"""Measures how the model is built and wrapped, how long a loader's pass is, and how long DDP's reduction delays a step.

`Structure`: whether a network normalises after its residual additions (Post-LN), which needs a warm-up. Read once, from
the graph of the first loss: a normalisation whose input is a sum, one part of which is the previous normalisation, with
nothing between. In Pre-LN networks that part is the previous sum. Where the graph cannot be read (torch.compile, a
normalisation of the user's) nothing is reported.

`FrozenStatistics`: `requires_grad_(False)` freezes the weights of a batch norm, but `model.train()` goes on updating
its running mean and variance; in evaluation the layer then computes something else than what was frozen. A batch norm
without weights counts as frozen where all weights of the module around it are.

`Communication`: by the timers of DDP's own logger, on CPU and GPU. They show how long gradients were under way after
the backward pass had computed the last of them; communication beside it costs nothing. DDP times its first ten
iterations and then every hundredth. Sharded models (FSDP) have no such timers, and host times say nothing of what
happens on a GPU: for them there is no number.

`OutsideOptimizer`: trainable parameters that get gradients and are in no optimizer stand still, and nothing else shows
it. A parameter stands still by a checksum of a sample of it (`weights.py`): one that the loop moves by itself, or by
copies that its optimizer holds, does not count. Nor does one that another optimizer of the process has, which may step
rarely or later, nor one that has only the gradient of an earlier stage, which does not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.internals import NormWithStatistics
from sentinel.hooks.torch_interop.layer_table import Layers, named_parameters
from sentinel.hooks.torch_interop.tensors import Sample, row_length, scalar, send_numbers
from sentinel.signals import OPENING_STEPS


class Wrapping(Probe):
    """Number of devices of `nn.DataParallel`, where it is in use."""

    tier = 3

    def after(self, step: Step) -> None:
        if step.parameters is not None and (devices := step.parameters.scattered) is not None:
            step.values["data_parallel_devices"] = float(devices)


NODES = 10_000
"""Most nodes of a graph that are read, at 1 us each."""
_NORMS = ("NativeLayerNormBackward", "FusedRmsNormBackward")
_TRANSPARENT = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "ToCopyBackward", "TransposeBackward")


class Structure(Probe):
    """`post_norm_layers`: number of normalisations after a residual addition; no sample where there are none."""

    tier = 3

    def __init__(self) -> None:
        self._found = -1

    def pass_begins(self, roots: Any) -> None:
        if self._found < 0:
            self._found = post_norms(roots.grad_fn) if isinstance(roots, torch.Tensor) else 0

    def after(self, step: Step) -> None:
        if self._found > 0:
            step.values["post_norm_layers"] = float(self._found)


def post_norms(root: Any) -> int:
    """Return the number of normalisations after a residual addition under a node of a graph."""
    seen: dict[int, Any] = {}  # holds the nodes, too: each is made when it is read, and ids are reused
    waiting, found = [root], 0
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        below = [one for one, _ in node.next_functions]
        waiting += below
        if below and node.name().startswith(_NORMS):
            total = _through(below[0])
            if total is not None and total.name().startswith("AddBackward"):
                parts = [_through(part) for part, _ in total.next_functions]
                found += any(part is not None and part.name().startswith(_NORMS) for part in parts)
    return found


def _through(node: Any) -> Any:
    """Return the first node, from `node` on, that is neither a view nor a cast."""
    while node is not None and node.name().startswith(_TRANSPARENT):
        node = node.next_functions[0][0]
    return node


class LoaderLength(Probe):
    """`loader_batches`, where known. Ranks that run out of batches early leave the others waiting in a collective."""

    tier = 2
    needs_no_gradients = True

    def after(self, step: Step) -> None:
        batches = step.totals.loader_batches
        if batches >= 0 and step.parameters is not None and step.parameters.lockstep:
            step.values["loader_batches"] = float(batches)


EARLY, SPACING = 12, 64
"""Number of first steps at which the logger is read, and spacing of later ones: it takes 50 us."""
_NANOSECONDS = 1e-9


class Communication(Probe):
    """`communication_seconds`: seconds of one timed iteration."""

    relaxed = True

    def __init__(self) -> None:
        self._iteration = 0

    def after(self, step: Step) -> None:
        if (step.seq < EARLY or step.seq % SPACING == 0) and step.parameters is not None:
            logged = step.parameters.reduction()
            iteration, whole = logged.get("iteration", 0), logged.get("backward_comm_time", 0)
            if iteration != self._iteration and whole:
                self._iteration = iteration
                hidden = logged.get("backward_compute_comm_overlap_time", 0)
                step.values["communication_seconds"] = max(whole - hidden, 0) * _NANOSECONDS


class FrozenStatistics(Probe):
    """Number of frozen normalisations that update their statistics; no sample in a model without a frozen one."""

    tier = 3

    def __init__(self) -> None:
        self._norms: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] | None = None
        """All normalisations with running statistics, each with the module that has weights: itself or one around."""
        self._rows: dict[int, int] = {}

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None or known.stream:
            return
        if self._norms is None:
            self._norms = [pair for model in known.models for pair in _list_norms(model)]
        frozen = [
            norm
            for ref, owner in self._norms
            if (norm := ref()) is not None and (held := owner()) is not None and _is_frozen(held)
        ]
        if not frozen:
            return
        moving = [norm for norm in frozen if norm.training]
        step.values["frozen_statistics"] = float(len(moving))
        if moving:
            step.values["frozen_statistics_row"] = float(self._row(known, moving[0]))

    def _row(self, known: Layers, norm: nn.Module) -> int:
        """Return the layer-table row of its weight; -1 where it has none."""
        if norm.weight is None:
            return -1
        key = id(norm.weight)
        if key not in self._rows:
            rows = (row for row, (_, _, p) in enumerate(named_parameters(known.models)) if p is norm.weight)
            self._rows[key] = next(rows, -1)
        return self._rows[key]


def _list_norms(model: nn.Module) -> Iterator[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]]:
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, NormWithStatistics) and module.running_mean is not None:
            path = name
            while path and next(modules[path].parameters(), None) is None:
                path = path.rpartition(".")[0]
            yield weakref.ref(module), weakref.ref(modules[path])


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


OUTSIDE_SPACING = 8
"""Steps between two looks in the first `OPENING_STEPS`, and until there were as many looks as the rule needs: a busy
machine may leave no time for some. Afterwards, it looks where tier 3 is sampled."""
CONFIRMING_LOOK = 4
"""The look at which other optimizers are searched once more: one may be made late. The rule wants as many looks."""


class OutsideOptimizer(Probe):
    """`parameters_outside`: their number; `outside_share`: their share of all trainable elements. No sample if none."""

    tier = 2

    def __init__(self) -> None:
        self._judged: frozenset[int] = frozenset()
        """Ids of parameters for which other optimizers were searched, which is a walk over all objects."""
        self._elsewhere: frozenset[int] = frozenset()
        self._known: tuple[list[int], torch.Tensor, torch.Tensor] | None = None
        """Ids of the parameters at the last look, their checksums, and those of their gradients."""
        self._looks = 0

    def before(self, step: Step) -> None:
        known = step.parameters
        if known is None or known.stream:  # the first optimizer's probe covers all
            return
        # The first look has nothing to compare with.
        close = step.seq < OPENING_STEPS or self._looks <= CONFIRMING_LOOK
        if not step.rare and (step.seq % OUTSIDE_SPACING or not close):
            return
        outside, trained = known.list_outside()
        self._looks += 1
        if outside.keys() - self._judged or (outside and self._looks == CONFIRMING_LOOK):
            self._judged, self._elsewhere = self._judged | outside.keys(), discovery.list_steered()
        outside = {key: parts for key, parts in outside.items() if key not in self._elsewhere}
        before, self._known = self._known, None
        if outside:
            each, parts, gradients = row_length(len(outside)), *zip(*outside.values(), strict=True)
            sums, changes = Sample(parts, each).checksums(), Sample(gradients, each).checksums()
            self._known = list(outside), sums, changes
            if before is not None and before[0] == self._known[0]:
                still = (before[1] == sums) & (before[2] != changes)
                sizes = send_numbers([part.numel() for part in parts], torch.float32, sums.device)
                step.values["parameters_outside"] = scalar(still.count_nonzero())
                step.values["outside_share"] = scalar((still * sizes).sum() / max(trained, 1))
        elif before is not None:  # they were added to the optimizer since
            step.values["parameters_outside"] = 0.0
