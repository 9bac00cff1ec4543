"""Tier 3: what the model is wrapped in.

Tier 3: whether a network normalises after its residual additions (Post-LN), which wants a warm-up.

Seen once, in the graph of the first loss: a normalisation whose input is a sum, one part of which is the normalisation
before it, with nothing between. In Pre-LN networks the sum before it is that part. Where the graph cannot be read
(torch.compile, a normalisation of somebody's own) nothing is told.

Tier 2: how many batches a pass over the loader has, where all ranks must take as many steps.

How long DDP's reduction of gradients holds a step up: by the timers of DDP's own logger, on CPU and GPU.

They tell how long gradients were on their way after the backward pass had computed the last of them; what went on
beside it costs nothing. DDP times its first ten iterations and then every hundredth. Sharded models (FSDP) have no such
timers, and host times say nothing of what happens on a GPU: for them there is no number.
"""

from __future__ import annotations

from typing import Any

import torch

from sentinel.hooks.measure.probe import Probe, Step


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
