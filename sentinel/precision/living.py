"""A run's history as findings: what its hooks sampled of gradients and updates."""

from __future__ import annotations

import math

import msgspec

from sentinel.errors import ConfigError
from sentinel.precision.advice import Finding
from sentinel.precision.magnitudes import FLOAT16
from sentinel.signals import EXPONENTS, below
from sentinel.store import History

_WINDOW = 20
"""Samples that are looked at, from the end."""
_VANISHED, _LOST = 0.01, 0.5


class Audit(msgspec.Struct, frozen=True):
    """Of one run."""

    run: str
    step: int
    shares: dict[str, float]
    """What, in words -> share of gradient elements."""
    lost: list[tuple[str, float]]
    """Layer -> share of elements that the last sampled step left as they were, the worst first."""
    findings: list[Finding]


def audit(history: History) -> Audit:
    """Of its last attempt. Raises ConfigError where the hooks sampled nothing of it."""
    attempt = max((number for number, _, _ in history.attempts()), default=0)

    def last(signal: str) -> float:
        values = [v for v in history.series(signal, attempt=attempt).values[-_WINDOW:] if math.isfinite(v)]
        return sorted(values)[len(values) // 2] if values else math.nan

    under = {exponent: share for exponent in EXPONENTS if not math.isnan(share := last(below(exponent)))}
    lost = _lost(history, attempt)
    if not under and not lost:
        raise ConfigError(f"run {history.run}: its hooks sampled no magnitudes of gradients yet (they do so rarely)")
    scale = last("loss_scale")
    found = [*_vanishing(under, scale), *_losing(lost)]
    words = {f"gradient elements under 2^{exponent}": share for exponent, share in under.items() if share > 0}
    return Audit(history.run, history.last_seq(attempt), words, lost, found)


def _vanishing(under: dict[int, float], scale: float) -> list[Finding]:
    """Elements are unscaled: with a scale of 2^k in use, float16 drops those under 2^(-25-k)."""
    if not under:
        return []
    used = round(math.log2(scale)) if scale > 0 else 0
    floor = FLOAT16.zero - used
    at = max((exponent for exponent in under if exponent <= floor), default=min(under))
    share = under[at]
    if share < _VANISHED:
        return []
    best = next((k for k in range(0, 33, 4) if under.get(_nearest(under, FLOAT16.zero - k), 0.0) < _VANISHED), 32)
    said = f"with the loss scale 2^{used}" if scale > 0 else "without a loss scale"
    return [
        Finding(
            "warning" if scale > 0 else "info",
            f"{said}, at least {share:.1%} of gradient elements become zero in float16",
            f"GradScaler(init_scale=2.0**{best}), or bfloat16",
        )
    ]


def _nearest(under: dict[int, float], power: int) -> int:
    return max((exponent for exponent in under if exponent <= power), default=min(under))


def _lost(history: History, attempt: int) -> list[tuple[str, float]]:
    for _, layers in reversed(history.layers(attempt=attempt)):
        rows = [(name, values.get("layer_lost_share", math.nan)) for name, values in layers.items()]
        rows = [(name, share) for name, share in rows if math.isfinite(share)]
        if rows:
            return sorted(rows, key=lambda row: -row[1])
    return []


def _losing(lost: list[tuple[str, float]]) -> list[Finding]:
    bad = [(name, share) for name, share in lost if share >= _LOST]
    if not bad:
        return []
    names = ", ".join(name for name, _ in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return [
        Finding(
            "warning",
            f"in {len(bad)} of {len(lost)} layers half of the elements or more did not change in a step: {names}",
            "float32 master weights, as autocast keeps them, or stochastic rounding",
        )
    ]
