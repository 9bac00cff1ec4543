"""Findings in a run's history, from the gradients and updates that its hooks sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from sentinel.errors import ConfigError
from sentinel.runs.steps import LayerStats
from sentinel.signals import EXPONENTS, below
from sentinel.store import History
from sentinel.text import join_names
from sentinel.toolkit.advice import Advice
from sentinel.toolkit.precision.magnitudes import FLOAT16

_WINDOW = 20
"""Number of last samples that are examined."""
_VANISHED, _LOST = 0.01, 0.5
_TINY = 0.5
"""Share of a layer's gradient below float16's smallest normal number from which on the layer belongs in float32."""
_SKIPPED = 0.01
"""Share of withheld steps from which on it is a finding; a healthy run has one per growth_interval of 2000 steps."""
_HEADROOM = 4
"""Powers of two to stay below float16's largest, as for a checkpoint: gradients vary from step to step."""
_NAMES = 5


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What 16 bits do to the gradients and updates of one run."""

    run: str
    step: int
    shares: dict[str, float]
    """Shares of gradient elements, by what they are, in words."""
    lost: list[tuple[str, float]]
    """Layers with the share of elements that the last sampled step did not change, the worst first."""
    largest: list[tuple[str, float]]
    """Layers with the largest magnitude of their gradient in the examined samples, the worst first."""
    tiny: list[tuple[str, float]]
    """Layers with the share of their gradient that is subnormal or zero in float16 with the scale in use, the worst
    first."""
    scale: float | None
    """The loss scale in use; None: there is none."""
    skipped: float
    """Share of steps that were withheld."""
    findings: list[Advice]


def audit(history: History) -> Audit:
    """Audit a run's last attempt. Raises ConfigError if the hooks have sampled no magnitudes of it."""
    attempt = max((number for number, _, _ in history.attempts()), default=0)

    def last(signal: str) -> float:
        values = [v for v in history.series(signal, attempt=attempt).values[-_WINDOW:] if math.isfinite(v)]
        return sorted(values)[len(values) // 2] if values else math.nan

    under = {exponent: share for exponent in EXPONENTS if not math.isnan(share := last(below(exponent)))}
    samples = [layers for _, layers in history.layers(attempt=attempt)]
    lost, tiny = _newest(samples, "layer_lost_share"), _newest(samples, "layer_grad_tiny_share")
    if not under and not lost:
        raise ConfigError(f"run {history.run}: its hooks sampled no magnitudes of gradients yet (they do so rarely)")
    scale, largest = last("loss_scale"), _largest(samples[-_WINDOW:])
    skips = history.series("step_skipped", attempt=attempt).values
    skipped = sum(skips) / len(skips) if skips else 0.0
    highest = math.frexp(largest[0][1])[1] - 1 if largest else -1074
    found = [
        *_overflowing(skipped, scale, largest, highest),
        *_vanishing(under, scale, highest, [name for name, share in tiny if share >= _TINY]),
        *_losing(lost),
    ]
    words = {f"gradient elements under 2^{exponent}": share for exponent, share in under.items() if share > 0}
    return Audit(
        run=history.run, step=history.last_seq(attempt), shares=words, lost=lost, largest=largest, tiny=tiny,
        scale=None if math.isnan(scale) else scale, skipped=skipped, findings=found,
    )  # fmt: skip


def _newest(samples: Sequence[LayerStats], stat: str) -> list[tuple[str, float]]:
    """Return (layer, value) of the last sample with any value, the highest first."""
    for layers in reversed(samples):
        rows = [(name, values.get(stat, math.nan)) for name, values in layers.items()]
        rows = [(name, value) for name, value in rows if math.isfinite(value)]
        if rows:
            return sorted(rows, key=lambda row: -row[1])
    return []


def _largest(samples: Sequence[LayerStats]) -> list[tuple[str, float]]:
    found: dict[str, float] = {}
    for layers in samples:
        for name, values in layers.items():
            ends = (values.get("layer_grad_min", math.nan), values.get("layer_grad_max", math.nan))
            size = max((abs(end) for end in ends if math.isfinite(end)), default=0.0)
            found[name] = max(found.get(name, 0.0), size)
    return sorted(((name, size) for name, size in found.items() if size > 0), key=lambda row: -row[1])


def _overflowing(skipped: float, scale: float, largest: Sequence[tuple[str, float]], highest: int) -> Iterator[Advice]:
    fitting = max(0, FLOAT16.overflow - 1 - _HEADROOM - highest)
    if skipped >= _SKIPPED:
        yield Advice(
            "warning",
            f"{skipped:.1%} of the steps were withheld: their scaled gradients were not finite",
            f"GradScaler(init_scale=2.0**{min(fitting, 32)}, growth_interval=2000), or bfloat16, which needs no scale",
        )
    used = 1.0 if math.isnan(scale) else scale
    over = [name for name, size in largest if size * used >= 2.0**FLOAT16.overflow]
    if over:
        with_scale = "without a loss scale" if math.isnan(scale) else f"with the loss scale 2^{math.log2(scale):.3g}"
        yield Advice(
            "warning" if scale > 0 else "info",
            f"{with_scale}, gradients of {join_names(over, _NAMES)} reach {largest[0][1] * used:.3g}: "
            "float16 ends at 65,504",
            f"a loss scale of 2^{fitting} at most, these layers in float32, or bfloat16",
        )


def _vanishing(under: dict[int, float], scale: float, highest: int, tiny: Sequence[str]) -> Iterator[Advice]:
    """Yield the finding on gradients that become zero.

    Their elements are unscaled: with a scale of 2^k in use, float16 drops those below 2^(-25-k).
    """
    if not under:
        return
    used = round(math.log2(scale)) if scale > 0 else 0
    share = under[_nearest(under, FLOAT16.zero - used)]
    if share < _VANISHED:
        return
    usable = [k for k in range(0, 33, 4) if highest + k < FLOAT16.overflow - _HEADROOM] or [0]
    best = next((k for k in usable if under[_nearest(under, FLOAT16.zero - k)] < _VANISHED), usable[-1])
    said = f"with the loss scale 2^{used}" if scale > 0 else "without a loss scale"
    kept = f"; keep in float32: {join_names(tiny, _NAMES)}" if tiny else ""
    yield Advice(
        "warning" if scale > 0 else "info",
        f"{said}, at least {share:.1%} of gradient elements become zero in float16",
        f"GradScaler(init_scale=2.0**{best}){kept}; or bfloat16",
    )


def _nearest(under: dict[int, float], power: int) -> int:
    return max((exponent for exponent in under if exponent <= power), default=min(under))


def _losing(lost: Sequence[tuple[str, float]]) -> Iterator[Advice]:
    bad = [name for name, share in lost if share >= _LOST]
    if bad:
        yield Advice(
            "warning",
            f"in {len(bad)} of {len(lost)} layers half of the elements or more did not change in a step: "
            f"{join_names(bad, _NAMES)}",
            "float32 master weights, as autocast keeps them, or stochastic rounding",
        )
