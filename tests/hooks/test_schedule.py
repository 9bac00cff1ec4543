"""Whether a scheduler was stepped before the first optimizer step; how many directions of its rank an adapter uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from sentinel.hooks.measure.probes import weights
from sentinel.hooks.measure.probes.loop import LrSchedule

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


def first_step(optimizer: Any, probe: LrSchedule) -> dict[str, float]:
    step: Any = SimpleNamespace(seq=0, optimizer=optimizer, values={})
    probe.enter(step)
    probe.after(step)
    values: dict[str, float] = step.values
    return values


def made() -> tuple[torch.optim.Adam, LRScheduler]:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=1e-3)
    return optimizer, CosineAnnealingLR(optimizer, 100)


def test_a_scheduler_that_was_stepped_once() -> None:
    optimizer, scheduler = made()
    probe = LrSchedule(optimizer)
    scheduler.step()
    assert first_step(optimizer, probe) == {"scheduler_first": 1e-3}


def test_the_right_order_and_a_scheduler_that_is_made_late() -> None:
    optimizer, _ = made()
    assert first_step(optimizer, LrSchedule(optimizer)) == {}
    late = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=1e-3)
    probe = LrSchedule(late)
    scheduler = LambdaLR(late, lambda step: 0.1 * (step + 1))
    assert first_step(late, probe) == {}
    assert scheduler.last_epoch == 0


def test_a_scheduler_that_is_advanced_to_where_a_run_goes_on() -> None:
    optimizer, scheduler = made()
    probe = LrSchedule(optimizer)
    for _ in range(10):
        scheduler.step()
    assert first_step(optimizer, probe) == {}


def test_a_warm_up_by_hand_beside_a_scheduler() -> None:
    optimizer, scheduler = made()
    probe = LrSchedule(optimizer)
    optimizer.param_groups[0]["lr"] = 1e-5
    assert first_step(optimizer, probe) == {}
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize(("rank", "used"), [(1, 1.0), (4, 4.0)])
def test_directions_of_the_spectrum(rank: int, used: float) -> None:
    a = torch.eye(4, 16)
    b = torch.zeros(8, 4)
    b[:rank, :rank] = 1e-9 * torch.eye(rank)
    assert float(weights._measure_rank((a, b))) == pytest.approx(used)
    assert float(weights._measure_rank((a, torch.zeros(8, 4)))) == 0.0


def zero_after(seq: int, optimizer: Any, probe: LrSchedule) -> dict[str, float]:
    step: Any = SimpleNamespace(seq=seq, optimizer=optimizer, values={})
    probe.disarm(step)
    values: dict[str, float] = step.values
    return values


@pytest.mark.parametrize(("stepped", "said"), [(0, 0.0), (9, 9.0)])
def test_a_rate_of_0_is_reported_with_its_schedulers_number_of_steps(stepped: int, said: float) -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: 0.0 if step < 60 else 1.0)
    probe = LrSchedule(optimizer)
    for _ in range(stepped):
        scheduler.step()
    assert zero_after(8, optimizer, probe) == {"scheduler_steps": said}
    assert zero_after(7, optimizer, probe) == zero_after(9, optimizer, probe) == {}


def test_a_rate_of_0_without_a_scheduler_and_a_rate_that_is_not_0() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=0.0)
    assert zero_after(8, optimizer, LrSchedule(optimizer)) == {"scheduler_steps": -1.0}
    trained = made()[0]
    assert zero_after(8, trained, LrSchedule(trained)) == {}
