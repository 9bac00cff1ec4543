"""Tier 3: whether a network normalises after its residual additions (Post-LN), which wants a warm-up.

Seen once, in the graph of the first loss: a normalisation whose input is a sum, one part of which is the normalisation
before it, with nothing between. In Pre-LN networks the sum before it is that part. Where the graph cannot be read
(torch.compile, a normalisation of somebody's own) nothing is told.
"""

from __future__ import annotations

from typing import Any

import torch

from sentinel.hooks.probe import Probe, Step

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
