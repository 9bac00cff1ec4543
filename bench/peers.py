"""Spike detectors of other projects, rewritten from their published rules, for bench/detection.py.

Each takes the losses of a run (and the gradient norms, or None), one number per row, and returns the rows that it
flags with its default settings. What it does then (skip the step, stop the run) is not simulated: it sees the run as
it went on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Series = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

STRETCH = 16_384
"""Rows that are processed at once: their windows are in memory together."""


def lightning(losses: Series, norms: Series | None) -> Flags:
    """SpikeDetection of Lightning Fabric (fabric/utilities/spike.py).

    Flags a loss that is not finite; or that is over the last one, and away from the mean of the last 10 by twice that
    mean. Flagged losses do not enter the mean.
    """
    flags, window, last = np.zeros(len(losses), bool), deque[float](maxlen=10), 0.0
    for row, loss in enumerate(losses.tolist()):
        if row:
            mean = sum(window) / len(window) if window else math.nan
            flags[row] = not math.isfinite(loss) or (loss > last and abs(loss - mean) >= abs(2.0 * mean))
        if not flags[row]:
            window.append(loss)
            last = loss
    return flags


def foundry(losses: Series, norms: Series | None) -> Flags:
    """KillLossSpike of LLM Foundry (callbacks/kill_loss_spike_callback.py).

    The window is 100 rows, or 5 % of the run if that is more. Flags 5 losses in a row of at least twice the mean of the
    window before; or, after two windows, half a window over the highest loss of the first window (10 at most).
    """
    size = max(100, round(0.05 * len(losses)))
    flags = np.zeros(len(losses), bool)
    if len(losses) <= size:
        return flags
    outliers = losses[size:] >= 2.0 * _means(losses[:-1], size)
    in_a_row = 0
    for row, outlier in enumerate(outliers.tolist(), size):
        in_a_row = in_a_row + 1 if outlier else 0
        flags[row] = in_a_row > 4
    high = np.cumsum(np.concatenate([[0], losses > min(10.0, float(losses[:size].max()))]))
    flags[2 * size :] |= high[2 * size : -1] - high[size : -size - 1] >= size / 2
    return flags


def megatron(losses: Series, norms: Series | None) -> Flags:
    """Megatron-LM's rerun state machine (core/rerun_state_machine.py).

    Flags a loss that is not finite (on by default), or 10 times the largest of the first 100 (off by default).
    """
    finite = np.isfinite(losses)
    seen = np.abs(losses[finite])[:100]
    large = np.abs(losses) >= 10.0 * seen.max(initial=math.inf if len(seen) < 100 else 0.0)
    large &= np.cumsum(finite) > 100
    return large | ~finite


def olmo(losses: Series, norms: Series | None) -> Flags:
    """SkipStepOptimizer of OLMo-core (optim/skip_step_optimizer.py).

    Flags a loss or gradient norm over 6 standard deviations from the mean of the 128 before (64 at least). While a NaN
    is in that window it flags every row.
    """
    flags = _beyond(losses, 6.0, 128, 64)
    return flags if norms is None else flags | _beyond(norms, 6.0, 128, 64)


def metaseq(losses: Series, norms: Series | None) -> Flags:
    """`ewm_ratio_to_skip_batch` of metaseq (trainer.py; off by default, 1.2 here).

    Flags by the ratio of the loss to its exponential moving average of span 9. Flagged losses do not enter the average;
    a NaN does, and makes it NaN for the rest of the run.
    """
    flags, mean = np.zeros(len(losses), bool), math.nan
    for row, loss in enumerate(losses.tolist()):
        if row == 0:
            mean = loss
        flags[row] = loss > 1.2 * mean if mean > 0 else False
        if not flags[row]:
            mean += 0.2 * (loss - mean)
    return flags


def first_try(losses: Series, norms: Series | None) -> Flags:
    """No peer: the first rule found on both halves of the recorded runs, which the stock rules must beat.

    Flags a median of 3 rows that is over the median of the 100 before by 20 MAD, if a tenth of the progress so far is
    lost.
    """
    flags, finite = np.zeros(len(losses), bool), np.flatnonzero(np.isfinite(losses))
    if len(finite) <= 103:
        return flags
    levels = np.median(np.lib.stride_tricks.sliding_window_view(losses[finite], 3), axis=1)
    best, windows = np.minimum.accumulate(levels), np.lib.stride_tricks.sliding_window_view(losses[finite][:-3], 100)
    for at in range(0, len(windows), STRETCH):
        part = windows[at : at + STRETCH]
        base = np.median(part, axis=1)
        spread = np.median(np.abs(part - base[:, None]), axis=1)
        now, so_far = (of[at + 100 : at + 100 + len(part)] for of in (levels, best))
        over = (now > base + 20 * spread) & (now - base > 0.1 * (levels[0] - so_far))
        flags[finite[at + 102 : at + 102 + len(part)]] = over
    return flags


def _means(values: Series, size: int) -> Series:
    """Return the mean of each window of `size` rows."""
    windows = np.lib.stride_tricks.sliding_window_view(values, size)
    return np.concatenate([windows[at : at + STRETCH].mean(axis=1) for at in range(0, len(windows), STRETCH)])


def _beyond(values: Series, sigmas: float, size: int, least: int) -> Flags:
    """Flag rows not within `sigmas` standard deviations of the mean of the `size` rows before, `least - 1` at least."""
    flags = np.zeros(len(values), bool)
    for row in range(least - 1, min(size, len(values))):
        flags[row] = not _score(values[row], values[:row]) <= sigmas
    if len(values) > size:
        windows = np.lib.stride_tricks.sliding_window_view(values[:-1], size)
        for at in range(0, len(windows), STRETCH):
            part = windows[at : at + STRETCH]
            scores = np.abs(values[size + at : size + at + len(part)] - part.mean(axis=1)) / part.std(axis=1, ddof=1)
            flags[size + at : size + at + len(part)] = ~(scores <= sigmas)
    return flags


def _score(value: np.float64, before: Series) -> np.float64:
    return np.abs(value - before.mean()) / before.std(ddof=1)


PEERS: Mapping[str, Callable[[Series, Series | None], Flags]] = {
    "Lightning SpikeDetection": lightning,
    "LLM Foundry KillLossSpike": foundry,
    "Megatron-LM 10x": megatron,
    "OLMo-core 6 sigma": olmo,
    "metaseq ratio 1.2": metaseq,
}
"""The other projects' detectors, by the names on the page."""

FIRST_TRY = "3 rows over 20 MAD"
PLAYED = {**PEERS, FIRST_TRY: first_try}
