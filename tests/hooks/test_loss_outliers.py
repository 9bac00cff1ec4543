"""The check on the training thread for loss outliers: which losses are outliers, and which are not."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Iterable

import pytest
import torch

from sentinel import wire
from sentinel.hooks.core.governor import OUTLIER_EVERY, OUTLIER_STEPS
from sentinel.hooks.step.loss_outliers import LateValues, LossOutliers, NormOutliers, OutlierWatch
from sentinel.hooks.transport.records import Record, Transfers
from tests.hooks.governed import make_governor


def test_a_loss_of_another_stage_is_no_outlier_for_that() -> None:
    governor = make_governor(0.01)
    told: list[int] = []

    class Guard:
        def warn(self) -> None:
            told.append(1)

    guard = Guard()
    watch = OutlierWatch(governor, weakref.WeakMethod(guard.warn))
    for seq in range(200):
        watch.judge_loss(1.0 + seq % 7 / 100, seq)
    watch.forget()
    watch.judge_loss(9.0, 200)
    assert not told
    watch.judge_loss(math.nan, 201)
    assert told


def odd(losses: Iterable[float]) -> list[int]:
    losses_so_far = LossOutliers()
    return [step for step, loss in enumerate(losses) if losses_so_far.observe(loss)]


def noisy(level: float, noise: float, steps: int, slope: float = 0.0) -> list[float]:
    rng = random.Random(3)
    return [level + slope * step + rng.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("level", [3.0, -3.0, 0.2])
def test_a_loss_without_noise_may_rise_by_a_hundredth(level: float) -> None:
    losses = LossOutliers()
    for _ in range(100):
        losses.observe(level)
    assert losses.limit == pytest.approx(level + 0.01 * abs(level))


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
def test_a_healthy_loss_is_not_odd(losses: list[float]) -> None:
    assert odd(losses) == []


def test_a_new_level_is_odd_for_a_while_and_then_usual() -> None:
    steps = odd(noisy(2.0, 0.02, 200) + noisy(3.0, 0.02, 600))
    assert steps[0] == 200
    assert steps[-1] < 500


def late(transfers: Transfers, **values: float) -> Record:
    """Return a step whose values are on a device and have not arrived yet."""
    record = Record(0, 0, 0.0, wire.LayerTable(digest="", layers=()))
    record.transfer = transfers.begin([(name, False, torch.tensor(value)) for name, value in values.items()])
    arrive(record, 0.0)
    return record


def arrive(record: Record, word: float = 1.0) -> None:
    """Set the word that is copied after the values: 1, it has arrived; 0, it has not."""
    assert record.transfer is not None
    record.transfer._buffer[0] = word


def test_losses_of_a_device_are_looked_at_as_they_come() -> None:
    waiting, transfers = LateValues("loss"), Transfers()
    records = [late(transfers, grad_norm=9.0, loss=2.0), late(transfers, grad_norm=9.0), late(transfers, loss=math.inf)]
    for record in records:
        waiting.add(record)
    assert list(waiting.take_arrived()) == []
    for record in records:
        arrive(record)
    assert records[0].ready()  # the sender was quicker
    assert list(waiting.take_arrived()) == [2.0, math.inf]
    assert list(waiting.take_arrived()) == []


def test_a_norm_far_above_those_before_has_its_very_step_looked_at() -> None:
    norms, usual = NormOutliers(), noisy(1.0, 0.3, 300)
    assert [norms.observe(norm) for norm in [*usual, math.inf, 4.0]] == [False] * 302
    assert norms.limit == pytest.approx(5.0, rel=0.3)
    assert norms.observe(60.0)
    assert norms.limit < 6.0, "an outlier is no new level"
    governor, warned = make_governor(0.01), Warned()
    watch, record = OutlierWatch(governor, weakref.WeakMethod(warned.warn)), late(Transfers(), grad_norm=60.0)
    assert not any(watch.judge_norm(norm, seq) for seq, norm in enumerate(usual))
    watch.add_record(record)
    assert not watch.judge_norm(torch.tensor(60.0), 2000)
    arrive(record)
    assert watch.judge_norm(torch.tensor(1.0), 2001)
    assert [seq for seq in range(2001, 2008) if governor.due(2, seq)] == [2001, 2002, 2003, 2004]
    assert warned.times == 0


class Warned:
    def __init__(self) -> None:
        self.times = 0

    def warn(self) -> None:
        self.times += 1


def test_a_nan_that_comes_late_is_acted_on() -> None:
    warned, governor = Warned(), make_governor(0.01)
    watch, record = OutlierWatch(governor, weakref.WeakMethod(warned.warn)), late(Transfers(), loss=math.nan)
    watch.add_record(record)
    watch.judge_loss(torch.tensor(0.0), 2000)
    assert (warned.times, governor.due(2, 2003)) == (0, False)
    arrive(record)
    watch.judge_loss(torch.tensor(0.0), 2001)
    assert (warned.times, governor.due(2, 2003)) == (1, True)
    assert watch.end_step(2001, {}, skipped=False)


def test_steps_without_a_gradient_are_no_measure_of_a_norm() -> None:
    norms = NormOutliers()
    assert not any(norms.observe(norm) for norm in [*[0.0] * 300, *noisy(1.0, 0.1, 300)])


@pytest.mark.parametrize("kind", ["odd losses", "losses that are NaN", "odd norms"])
def test_outliers_that_come_all_the_time_are_not_followed_up_without_end(kind: str) -> None:
    governor, warned, followed = make_governor(0.02), Warned(), list[int]()
    watch = OutlierWatch(governor, weakref.WeakMethod(warned.warn))
    for seq in range(30_000):
        governor.spacing.update({1: 1 << 20, 2: 1 << 20})
        odd = seq > 1000 and seq % 20 == 0
        if kind == "odd norms":
            watch.judge_norm(1.0 if odd else 1e-6, seq)
        else:
            watch.judge_loss(1.0 + seq % 7 / 100 if not odd else 9.0 if kind == "odd losses" else math.nan, seq)
        followed += [seq] * governor.due(2, seq)
        governor.record_step(seq, 0.01, 0.0)
    first, rest = [sum(seq in part for seq in followed) for part in (range(1000, 5000), range(10_000, 30_000))]
    assert first > OUTLIER_STEPS
    assert 0.9 / OUTLIER_EVERY < rest / 20_000 < 1.1 / OUTLIER_EVERY
    assert warned.times == (0 if kind == "odd norms" else 1_449), "each holds snapshots back"
    for seq in range(30_000, 100_000):
        governor.record_step(seq, 0.01, 0.0)
    governor.spacing.update({1: 1 << 20, 2: 1 << 20})
    watch.judge_loss(math.nan, 100_000)
    assert [seq for seq in range(100_000, 100_100) if governor.due(2, seq)] == [*range(100_000, 100_050)], "all, again"


def test_attention_is_measured_in_steps_of_the_first_optimizer() -> None:
    """A critic makes five steps for one of the generator's; its outlier concerns the generator's present step."""
    governor = make_governor(0.02)
    critic = OutlierWatch(governor, weakref.WeakMethod(governor.clear_orders), first=False)
    governor.spacing.update({1: 1000, 2: 1000})
    for seq in range(600):
        governor.record_step(seq, 0.01, 0.0)
    for seq in range(3000):
        critic.judge_loss(1.0 + seq % 7 / 100, seq)
    critic.judge_loss(9.0, 3000)
    governor.spacing.update({1: 1000, 2: 1000})
    assert governor.due(2, 601)
    assert governor.due(2, 3001, first=False)
    assert not governor.due(2, 650)
    for seq in range(600, 650):
        governor.record_step(seq, 0.01, 0.0)
    governor.spacing.update({1: 1000, 2: 1000})
    assert not governor.due(2, 3251, first=False)
