"""Findings in the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sentinel.text import join_names
from sentinel.toolkit.advice import Advice, sort_advice
from sentinel.toolkit.precision.magnitudes import FLOAT16, Magnitudes, best_scale, together

_VANISHED = 0.01
"""Least share of gradients that become zero which is a finding."""
_LOST = 0.5
"""Least share of updates too small for a bfloat16 weight which is a finding: the limit of the rule LostUpdates."""
_NAMES = 5


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One trained tensor of a checkpoint."""

    name: str
    dtype: str
    weights: Magnitudes
    gradients: Magnitudes | None = None
    """Magnitudes of typical gradients: the root of Adam's second moment. None: no optimizer state."""
    lost: float | None = None
    """Share of elements whose next update is less than 2^-9 of them."""


def findings(tensors: list[Tensor]) -> list[Advice]:
    """Return the findings in these tensors, the most severe first."""
    return sort_advice(_findings(tensors))


def _findings(tensors: list[Tensor]) -> Iterator[Advice]:
    broken = [t for t in tensors if t.weights.nonfinite]
    if broken:
        count = sum(t.weights.nonfinite for t in broken)
        yield Advice(
            "critical",
            f"{count} weights are not finite, in {join_names([t.name for t in broken], _NAMES)}",
            "this checkpoint cannot be trained on: go back to an older one",
        )
    large = [t for t in tensors if t.weights.highest >= FLOAT16.overflow]
    if large:
        yield Advice(
            "warning",
            f"weights of 65,536 and more, which float16 cannot hold, in {join_names([t.name for t in large], _NAMES)}",
            "keep these layers in float32, or use bfloat16",
        )
    yield from _gradients(tensors)
    yield from _updates(tensors)


def _gradients(tensors: list[Tensor]) -> Iterator[Advice]:
    known = [(t, t.gradients) for t in tensors if t.gradients is not None]
    everything = together([gradients for _, gradients in known])
    bare = everything.share_under(FLOAT16.zero)
    if bare < _VANISHED:
        return
    scale = best_scale(everything)
    left = everything.share_under(FLOAT16.zero, scale)
    hopeless = [t for t, gradients in known if gradients.share_under(FLOAT16.zero, scale) >= _VANISHED]
    kept = f"; keep in float32: {join_names([t.name for t in hopeless], _NAMES)}" if hopeless else ""
    yield Advice(
        "warning",
        f"without a loss scale {bare:.1%} of typical gradients become zero in float16; with 2^{scale} {left:.1%} do",
        f"GradScaler(init_scale=2.0**{scale}){kept}; or bfloat16, which loses none of them",
    )


def _updates(tensors: list[Tensor]) -> Iterator[Advice]:
    known = [(t, t.lost, t.weights.total) for t in tensors if t.lost is not None]
    total = sum(size for *_, size in known)
    share = sum(lost * size for _, lost, size in known) / total if total else 0.0
    if share < _LOST:
        return
    worst = sorted(known, key=lambda one: one[1], reverse=True)
    already = any(t.dtype == "bfloat16" for t, *_ in known)
    yield Advice(
        "warning" if already else "info",
        f"{share:.0%} of the next updates are under 2^-9 of their weight, which bfloat16 weights "
        f"{'do' if already else 'would'} not feel; most in {join_names([t.name for t, *_ in worst], _NAMES)}",
        "float32 master weights, as autocast keeps them, or stochastic rounding",
    )
