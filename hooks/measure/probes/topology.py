"""How the model is built and wrapped, how long a pass over the loader is, and how long DDP's reduction holds a step up.

`Structure`: whether a network normalises after its residual additions (Post-LN), which wants a warm-up. Seen once, in
the graph of the first loss: a normalisation whose input is a sum, one part of which is the normalisation before it,
with nothing between. In Pre-LN networks the sum before it is that part. Where the graph cannot be read (torch.compile,
a normalisation of the user's) nothing is reported.

`FrozenStatistics`: `requires_grad_(False)` stops the weights of a batch norm, and `model.train()` goes on updating its
running mean and variance; what the layer computes in evaluation is then another thing than what was frozen. One without
weights is frozen where all that the module around it has is.

`Communication`: by the timers of DDP's own logger, on CPU and GPU. They show how long gradients were on their way after
the backward pass had computed the last of them; what went on beside it costs nothing. DDP times its first ten
iterations and then every hundredth. Sharded models (FSDP) have no such timers, and host times say nothing of what
happens on a GPU: for them there is no number.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.internals import NormWithStatistics
from sentinel.hooks.torch_interop.layer_table import Layers, named_parameters


class Wrapping(Probe):
    """Devices of `nn.DataParallel`, where it is in use."""

    tier = 3

    def after(self, step: Step) -> None:
        if step.parameters is not None and (devices := step.parameters.scattered) is not None:
            step.values["data_parallel_devices"] = float(devices)


NODES = 10_000
"""Of a graph that are looked at, at 1 us each."""
_NORMS = ("NativeLayerNormBackward", "FusedRmsNormBackward")
_TRANSPARENT = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "ToCopyBackward", "TransposeBackward")


class Structure(Probe):
    """`post_norm_layers`: such normalisations; no sample where there are none."""

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
    """How many there are under a node of a graph."""
    seen: dict[int, Any] = {}  # the nodes themselves too: they are made as they are asked for, and ids are used again
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
    """What a node is once views and casts are taken away."""
    while node is not None and node.name().startswith(_TRANSPARENT):
        node = node.next_functions[0][0]
    return node


class LoaderLength(Probe):
    """Said where it is known. Ranks that run out of batches early leave the others waiting in a collective."""

    tier = 2
    blind = True

    def after(self, step: Step) -> None:
        batches = step.totals.loader_batches
        if batches >= 0 and step.parameters is not None and step.parameters.lockstep:
            step.values["loader_batches"] = float(batches)


EARLY, SPACING = 12, 64
"""Steps from the first one at which the logger is read, and of the later ones every so many: it takes 50 us."""
_NANOSECONDS = 1e-9


class Communication(Probe):
    """`communication_seconds`, of one timed iteration."""

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
    """How many frozen normalisations update their statistics; absent in a model without any that is frozen."""

    tier = 3

    def __init__(self) -> None:
        self._norms: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] | None = None
        """All that keep running statistics, each with what has weights: itself, or else the module around it."""
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
        """The layer-table row of its weight; -1 where it has none."""
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
