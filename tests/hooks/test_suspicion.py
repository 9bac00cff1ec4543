"""The look on the training thread: an odd loss, and what is none."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from sentinel.hooks.suspicion import Suspicion


def odd(losses: Iterable[float]) -> list[int]:
    suspicion = Suspicion()
    return [step for step, loss in enumerate(losses) if suspicion.odd(loss)]


def noisy(level: float, noise: float, steps: int, slope: float = 0.0) -> list[float]:
    rng = random.Random(3)
    return [level + slope * step + rng.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("level", [3.0, -3.0, 0.0])
def test_a_spike_is_odd_at_its_first_step(level: float) -> None:
    assert odd([*noisy(level, 0.02, 200), level + 1.0])[-1:] == [200]


@pytest.mark.parametrize(
    "losses",
    [
        noisy(3.0, 0.05, 500),
        noisy(3.0, 0.05, 500, slope=-0.005),
        [2.5] * 300,
        [0.0] * 300,
        [1e-6, 1.004e-6] * 150,
        [*noisy(9.0, 1.0, 49), 100.0],
    ],
    ids=["noise", "falling", "constant", "zero", "nearly constant", "young"],
)
def test_a_healthy_loss_is_not(losses: list[float]) -> None:
    assert odd(losses) == []


def test_a_new_level_is_odd_for_a_while_and_then_usual() -> None:
    steps = odd(noisy(2.0, 0.02, 200) + noisy(3.0, 0.02, 600))
    assert steps[0] == 200
    assert steps[-1] < 500
