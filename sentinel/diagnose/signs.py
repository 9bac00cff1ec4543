"""Find which signal left its own past first, and which layers went with it.

A signal is odd at a step where it is not finite, or above the noise of its own past and clearly larger. Its onset is
where the unbroken stretch of odd steps that leads up to the incident began. The order of the onsets distinguishes a bad
batch from a broken update: the loss of a step is computed before the step's update, from weights that the update of
the previous step made.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sentinel.runs.steps import LayerStats, RunStep

CHAIN = ("loss_scale", "grad_norm", "loss")
"""Signals in the order in which a fault runs through them: GLM-130B's scale fell about 30 steps before its loss rose
(THUDM/GLM-130B, logs/main-log-en.md), BLOOM-176B's gradient norm rose one step before (bigscience, tr11 chronicles)."""

PAST = 100
"""Samples that make a signal's past."""
GUARD = 32
"""Samples before the incident that are left out of the past: a slow onset must not become its own baseline."""
NOISE = 6.0
"""Robust standard deviations (1.4826 MAD) over the median: what llm-foundry and OLMo-core call an outlier (6 sigma)."""
GROWTH = {"loss": 1.05, "grad_norm": 1.5}
"""Least ratio to the median: without it, every change of a signal with no noise would be an outlier."""
GAP = 2
"""Normal steps in a row that an odd stretch may contain."""
OUTLIVED = 100
"""Steps of a falling loss that show that what was odd at their start did no harm."""
_SIDE = 10
"""Losses at either end of these steps whose medians are compared."""
SHOWN_LAYERS = 5
COMPARED_VALUES, LEAST_COMPARED = 100_000, 8
"""Values of layers in the samples that are compared, at most, and samples at least: looking through so many takes some
30 ms, in which a daemon does nothing else."""


class Sign(msgspec.Struct, frozen=True):
    """A signal that left its past."""

    signal: str
    seq: int
    """Its first odd step."""
    value: float
    usual: float
    """Median of its past."""


class GrownLayer(msgspec.Struct, frozen=True):
    """A layer whose gradient left its past."""

    name: str
    norm: float
    """Largest gradient norm since the first sign; NaN or infinite where an element is."""
    usual: float
    """Median of its earlier gradient norms."""
    nonfinite: int = 0
    """Most non-finite elements in one gradient."""

    @property
    def ratio(self) -> float:
        """Growth over its own past; infinite where the gradient is not finite, NaN where there is no past."""
        if self.nonfinite or not math.isfinite(self.norm):
            return math.inf
        if math.isnan(self.usual):
            return math.nan
        return self.norm / self.usual if self.usual > 0 else math.inf


def first_signs(steps: Sequence[RunStep], since: int, until: int) -> list[Sign]:
    """Return the onsets of all signals of the chain, the earliest first, for an incident at steps `since` to
    `until`."""
    found = []
    losses = [(s.seq, s.run["loss"]) for s in steps if s.seq < since and math.isfinite(s.run.get("loss", math.nan))]
    for signal in CHAIN:
        series = [(s.seq, s.run[signal]) for s in steps if s.seq <= until and signal in s.run and _counts(signal, s)]
        sign = _onset(signal, series, since)
        if sign is not None and signal != "loss" and _is_outlived(sign, losses, since):
            sign = _onset(signal, series, since, earliest=since - OUTLIVED)
        if sign is not None:
            found.append(sign)
    return sorted(found, key=lambda sign: sign.seq)


def _is_outlived(sign: Sign, losses: Sequence[tuple[int, float]], since: int) -> bool:
    """Return whether the loss fell for `OUTLIVED` steps between the sign and the event."""
    between = [loss for seq, loss in losses if seq >= sign.seq]
    if since - sign.seq < OUTLIVED or len(between) < 2 * _SIDE:
        return False
    return statistics.median(between[-_SIDE:]) < statistics.median(between[:_SIDE])


def grown_layers(
    blocks: Iterable[tuple[int, LayerStats]], since: int, until: int, steps: Iterable[RunStep] = ()
) -> list[GrownLayer]:
    """Return the layers whose gradients grew most over their own past, the largest growth first; non-finite ones come
    before all.

    Gradients of clipped steps in `steps` are compared as they were before clipping: after it, no spike is left. With
    many layers fewer samples are compared (`COMPARED_VALUES`), the newest on either side of `since`.
    """
    clipped = {step.seq: by for step in steps if (by := _clipping_factor(step)) > 1.0}
    sampled = [(seq, layers) for seq, layers in blocks if seq <= until]
    most = max(LEAST_COMPARED, COMPARED_VALUES // max([len(layers.names) for _, layers in sampled], default=1))
    past: dict[str, list[float]] = {}
    for seq, layers in [sample for sample in sampled if sample[0] < since][-most:]:
        for name, norm, _ in _list_gradients(layers, clipped.get(seq, 1.0)):
            past.setdefault(name, []).append(norm)
    peak: dict[str, tuple[float, int]] = {}
    for seq, layers in [sample for sample in sampled if sample[0] >= since][-most:]:
        for name, norm, count in _list_gradients(layers, clipped.get(seq, 1.0)):
            norm_before, count_before = peak.get(name, (-math.inf, 0))
            peak[name] = (_larger(norm, norm_before), max(count, count_before))
    grown = [GrownLayer(name, norm, _usual(past.get(name, [])), count) for name, (norm, count) in peak.items()]
    odd = [layer for layer in grown if layer.ratio > GROWTH["grad_norm"]]
    return sorted(odd, key=lambda layer: (-layer.ratio, -layer.norm if math.isfinite(layer.norm) else 0.0))


def _list_gradients(layers: LayerStats, factor: float) -> Iterator[tuple[str, float, int]]:
    """Yield (layer, norm of its gradient before clipping by `factor`, its non-finite elements) for layers with
    values."""
    norms = layers.stats.get("layer_grad_norm") or itertools.repeat(math.nan, len(layers.names))
    counts = layers.stats.get("layer_nonfinite") or itertools.repeat(0.0, len(layers.names))
    for name, there, norm, count in zip(layers.names, layers.present, norms, counts, strict=True):
        if there:
            yield name, norm * factor, _count(count)


def _clipping_factor(step: RunStep) -> float:
    """Return the factor by which clipping divided the gradients."""
    before, after = step.run.get("grad_norm", math.nan), step.run.get("grad_norm_applied", math.nan)
    return before / after if "clip_limit" in step.run and math.isfinite(before) and after > 0 else 1.0


def _counts(signal: str, step: RunStep) -> bool:
    """Return whether a sample counts: not the gradient of a step that GradScaler withheld, which overflowed and was not
    applied."""
    return signal != "grad_norm" or step.run.get("step_skipped") != 1.0


def _onset(signal: str, series: list[tuple[int, float]], since: int, earliest: int = 0) -> Sign | None:
    before = [value for seq, value in series if seq < since and math.isfinite(value)]
    past = (before[:-GUARD] or before)[-PAST:]
    if len(past) < 3:
        odd_value = [(seq, value) for seq, value in series if not math.isfinite(value)]
        return Sign(signal, odd_value[0][0], odd_value[0][1], _usual(past)) if odd_value else None
    usual = statistics.median(past)
    noise = 1.4826 * statistics.median(abs(value - usual) for value in past)
    onset, normal = None, 0
    for seq, value in reversed(series):
        if seq < earliest:
            break
        if _odd(signal, value, usual, noise):
            onset, normal = (seq, value), 0
        elif seq < since:
            normal += 1
            if normal > GAP:
                break
    return Sign(signal, onset[0], onset[1], usual) if onset else None


def _odd(signal: str, value: float, usual: float, noise: float) -> bool:
    if not math.isfinite(value):
        return True
    if signal == "loss_scale":
        return value <= usual / 4
    return value > usual + NOISE * noise and value - usual > (GROWTH[signal] - 1) * abs(usual)


def _usual(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _count(value: float) -> int:
    """Return a count; 0 for NaN, as where ranks put a layer together and only some of them sampled it."""
    return int(value) if math.isfinite(value) else 0


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) or a > b else b
