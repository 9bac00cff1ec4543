"""Cases in which other detectors are blind or noisy: the stock rules over each, healthy and with a fault.

A spike that stays is reported at its second sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from sentinel.engine import RUN, Observation, Rewound
from sentinel.engine.backtest import backtest
from sentinel.rulebook import loader

NAN, INF = math.nan, math.inf
Series = Sequence[float | None]


def noise(level: float, count: int, spread: float = 0.02, slope: float = 0.0) -> list[float]:
    generator = random.Random(f"{level} {count}")
    return [level + slope * i + generator.gauss(0, spread) for i in range(count)]


def apart(samples: Series, spacing: int) -> list[float | None]:
    """Return samples as they are logged at every `spacing`-th step."""
    return [value for sample in samples for value in (sample, *[None] * (spacing - 1))]


def steps(**series: Series) -> list[Observation]:
    length = max(map(len, series.values()))
    found = []
    for seq in range(length):
        row = {name: value[seq] for name, value in series.items() if seq < len(value)}
        values = {name: value for name, value in row.items() if value is not None}
        if values:
            found.append(Observation(seq, float(seq), {RUN: values}))
    return found


def find_alert_steps(observations: Sequence[Observation | Rewound]) -> dict[str, list[int]]:
    """Return alert -> the steps at which it fires."""
    found: dict[str, list[int]] = {}
    for alert in backtest(loader.load().rules, observations, run="t").alerts:
        found.setdefault(alert.alert, []).append(alert.step)
    return found


CALM = noise(3, 400)
FALLING = noise(4, 400, slope=-0.005)
SMALL = [1e-6 * (1 + i % 3) for i in range(300)]
MEMORISED = [*noise(2.3, 225, slope=-0.01), *SMALL]
RESTARTED = [*noise(6.9, 50, 0.03, -0.1), *noise(1.9, 200, 0.03, -0.005)]
SHAKEN = noise(1, 400, 0.1)

GENERATOR = random.Random(5)
RETURNS = [(5 + i / 10) * abs(1 + GENERATOR.gauss(0, 0.3)) for i in range(980)]
"""The loss of a value network: it grows with the returns."""
SQUARES = [(1 + math.exp(-i / 60)) * sum(GENERATOR.gauss(0, 1) ** 2 for _ in range(4)) / 4 for i in range(1500)]
"""The loss of a regression with noisy targets, at a batch of four: it falls from 2 to 1, which few rows show."""

CASES: dict[str, tuple[list[Observation], dict[str, list[int]]]] = {
    "a NaN": (steps(loss=[*CALM[:200], NAN, *CALM[200:]]), {"NonFiniteLoss": [200]}),
    "a NaN, and a spike soon after it": (
        steps(loss=[*CALM[:200], NAN, *CALM[200:260], 6, NAN, 6, 6, 6]),
        {"NonFiniteLoss": [200, 262], "LossSpike": [263]},
    ),
    "an infinite loss": (steps(loss=[*CALM[:200], INF, *CALM[200:]]), {"NonFiniteLoss": [200]}),
    "an infinite gradient that is applied": (
        steps(loss=CALM, grad_norm=[*SHAKEN[:200], INF, *SHAKEN[200:399]]),
        {"NonFiniteGradient": [200]},
    ),
    "infinite gradients that the scaler withholds": (
        steps(
            loss=CALM,
            grad_norm=[*SHAKEN[:200], INF, INF, *SHAKEN[200:398]],
            step_skipped=[*[0.0] * 200, 1.0, 1.0, *[0.0] * 198],
        ),
        {},
    ),
    "a negative loss": (steps(loss=[*noise(1, 300, 0.1, -0.02), *noise(-5, 200, 0.1)]), {}),
    "a negative loss that spikes": (
        steps(loss=[*noise(1, 300, 0.1, -0.02), *noise(-5, 100, 0.1), *noise(-1, 10, 0.1)]),
        {"LossSpike": [401]},
    ),
    "a loss next to nothing, whose MAD is 0": (
        steps(loss=[*MEMORISED, 0.02, 0.02, *SMALL, *[0.0] * 200, 0.01, 0.01]),
        {},
    ),
    "a loss next to nothing that spikes": (
        steps(loss=[*MEMORISED, *noise(1.5, 20)]),
        {"LossSpike": [len(MEMORISED) + 1]},
    ),
    "a value's loss, which grows with the returns": (steps(loss=RETURNS), {}),
    "a regression at a batch of four": (steps(loss=[0.4, *SQUARES]), {}),
    "a run that blows up at once, and is as noisy": (
        steps(loss=[3.0, *[1e6 * loss for loss in SQUARES]]),
        {"Divergence": [100], "LossNotDecreasing": [1000]},
    ),
    "a resumed run that is ruined": (steps(loss=[*noise(2, 150), *noise(2, 400, slope=0.004)]), {"Divergence": [430]}),
    "a loss of every 10th step": (steps(loss=apart(FALLING, 10)), {}),
    "one that spikes": (steps(loss=apart([*FALLING[:100], *noise(6, 9)], 10)), {"LossSpike": [1010]}),
    "a loss of every 100th step": (steps(loss=apart(FALLING, 100)), {}),
    "one of them that spikes": (steps(loss=apart([*FALLING[:100], *noise(6, 9)], 100)), {"LossSpike": [10_100]}),
    "a norm of every 100th step that spikes": (
        steps(grad_norm=apart([*SHAKEN[:60], 40, 40, *SHAKEN[60:80]], 100)),
        {"GradientSpike": [6100]},
    ),
    "a planned restart": (steps(loss=[*RESTARTED, *RESTARTED]), {}),
    "a restart that does not come down": (steps(loss=[*RESTARTED, *noise(6.9, 60, 0.03)]), {"Divergence": [279]}),
    "a NaN that the trainer logs as 0": (
        steps(loss=[*CALM[:200], 0.0, 0.0, 0.0], grad_norm=[*SHAKEN[:200], NAN, NAN, NAN]),
        {"NonFiniteGradient": [200]},
    ),
    "a norm that stands still while steps are withheld": (
        steps(
            loss=CALM,
            grad_norm=[*SHAKEN[:200], *[480.0] * 5, *SHAKEN[200:395]],
            step_skipped=[*[0.0] * 199, *[1.0] * 6, *[0.0] * 195],
        ),
        {},
    ),
    "one under which the loss spikes": (
        steps(
            loss=[*CALM[:199], *[4.4] * 6, *CALM[205:]],
            grad_norm=[*SHAKEN[:199], *[0.5] * 6, *SHAKEN[205:]],
            step_skipped=[*[0.0] * 199, *[1.0] * 6, *[0.0] * 195],
        ),
        {"LossSpike": [200]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_stock_rules_fire_neither_falsely_nor_too_late(case: str) -> None:
    observations, expected = CASES[case]
    assert find_alert_steps(observations) == expected


@pytest.mark.parametrize("spike", [False, True])
def test_a_resumed_run_whose_step_jumps_back(spike: bool) -> None:
    """The log has steps 0 to 299, and then 200 to 399 again."""
    again = [*FALLING[200:350], *([7.0] * 9 if spike else ()), *FALLING[350:]]
    first, second = steps(loss=FALLING[:300]), steps(loss=[*[None] * 300, *again])
    assert find_alert_steps([*first, Rewound(199, 299, -100), *second]) == ({"LossSpike": [350]} if spike else {})
