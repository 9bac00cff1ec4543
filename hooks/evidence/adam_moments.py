"""The optimizer's second moments against the gradients of a step, and the exponents of the latter: when asked.

Adam's second moment is a running mean of squared gradients. Where one huge gradient is in it, its root is far over the
gradients of now, and the layer's updates are small by as much for 1/(1 - beta2) steps. From a strided sample.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.strided_sample import Sample, row_length
from sentinel.signals import EXPONENTS
from sentinel.wire.evidence import Moment, Moments

SHOWN = 16


def moments(optimizer: Any, layers: Layers, seq: int) -> Moments:
    """Of the step whose gradients are there."""
    factors = _corrections(optimizer)
    rows = [
        (layers.table.layers[row].name, local(p.grad), _second(optimizer, p), factors.get(id(p), 1.0))
        for row, p, _ in layers.measured
        if p.grad is not None and not p.grad.is_sparse
    ]
    if not rows:
        return Moments(seq=seq, missing=("gradients: no parameter had one at that step",))
    scale = getattr(optimizer, "grad_scale", None)
    sample = Sample([gradient for _, gradient, _, _ in rows], row_length(len(rows)))
    if isinstance(scale, Tensor):
        sample.values /= scale.to(sample.values.device, torch.float32)
    sizes = sample.values.abs()
    counted = sizes[sizes > 0]
    below = torch.stack([(counted < 2.0**exponent).sum() for exponent in EXPONENTS]).tolist()
    gradients = (sizes.square().sum(1) / sample.counts).sqrt().tolist()
    held = [(place, second) for place, (_, _, second, _) in enumerate(rows) if second is not None]
    roots = dict(zip([place for place, _ in held], _roots([second for _, second in held]), strict=True))
    found = [
        Moment(layer=name, gradient=gradients[place], second=roots[place] * factor)
        for place, (name, _, _, factor) in enumerate(rows)
        if place in roots
    ]
    ratios = [one.ratio for one in found if math.isfinite(one.ratio) and one.ratio > 0]
    usual = statistics.median(ratios) if ratios else math.nan
    found.sort(key=lambda one: -one.ratio if math.isfinite(one.ratio) else -math.inf)
    total = max(int(counted.numel()), 1)
    return Moments(
        seq=seq, layers=tuple(found[:SHOWN]), usual=usual,
        exponents={str(exponent): n / total for exponent, n in zip(EXPONENTS, below, strict=True)},
        zero_share=1 - counted.numel() / max(int(sample.counts.sum()), 1),
        missing=() if found else (f"second moments: {type(optimizer).__name__} keeps none by element",),
    )  # fmt: skip


def _second(optimizer: Any, parameter: Any) -> Tensor | None:
    state = optimizer.state.get(parameter, {})
    second = state.get("exp_avg_sq", state.get("square_avg")) if isinstance(state, dict) else None
    return local(second) if isinstance(second, Tensor) and local(second).numel() else None


def _roots(seconds: list[Tensor]) -> list[float]:
    if not seconds:
        return []
    sample = Sample(seconds, row_length(len(seconds)))
    found: list[float] = (sample.values.sum(1) / sample.counts).sqrt().tolist()
    return found


def _corrections(optimizer: Any) -> dict[int, float]:
    """Parameter -> what Adam multiplies the root with while it is young."""
    found = {}
    for group in optimizer.param_groups:
        beta = group.get("betas", (0.0, 0.0))[1]
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            steps = float(state["step"]) if isinstance(state, dict) and "step" in state else 0.0
            if steps and 0 < beta < 1:
                found[id(parameter)] = 1 / math.sqrt(1 - beta**steps)
    return found
