"""Schedulers of parameter groups that the loop adds after the snapshot: it unfreezes layers, and does so only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from sentinel import wire
from tests.rollback.training import Training, batches, of_type, roll_back

DATA = batches(12)
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)], milestones=[3]
    ),
}
PER_GROUP = ("base_lrs", "lr_lambdas", "min_lrs", "max_lrs")


def extend(schedule: Any) -> None:
    """Tell a scheduler, and those inside it, of a group that was added, as scripts do."""
    for one in (schedule, *getattr(schedule, "_schedulers", ())):
        for key in PER_GROUP:
            if key in vars(one):
                getattr(one, key).append(getattr(one, key)[0] if key == "lr_lambdas" else 0.5)


@pytest.mark.parametrize("between", [False, True], ids=["after", "between"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_keeps_what_it_has_of_groups_that_were_added_since(kind: str, between: bool) -> None:
    """`between`: the snapshot is taken between the group and the scheduler's entries for it."""
    training = Training("sgd nesterov")
    extra = nn.Parameter(torch.ones(3))
    training.model[0].register_parameter("extra", extra)
    training.schedule = schedule = SCHEDULES[kind](training.optimizer)
    restorer, sent = training.arm()
    training.schedule = Stepping(schedule)
    epochs = []
    for seq in range(12):
        if seq == 6 - between:
            training.optimizer.add_param_group({"params": [extra], "lr": 0.25, "initial_lr": 0.5})
            training.schedule.on_next = lambda: extend(schedule)
        if seq == 9:
            roll_back(restorer, at=9, to=5)
        training.step(DATA[seq])
        epochs.append(schedule.last_epoch)
    assert [answer.ok for answer in of_type(sent, wire.RolledBack)] == [True]
    assert epochs[-3:] == epochs[5:8]
    for one in (schedule, *getattr(schedule, "_schedulers", ())):
        for key in {*PER_GROUP} & vars(one).keys():
            assert len(getattr(one, key)) == 2, key
            assert key == "lr_lambdas" or getattr(one, key)[1] == 0.5
    assert schedule.get_last_lr() == [group["lr"] for group in training.optimizer.param_groups]


class Stepping:
    """Steps a scheduler with a metric that gets no better, if it takes one."""

    def __init__(self, schedule: Any) -> None:
        self._schedule, self._epochs = schedule, 0
        self.on_next: Callable[[], None] | None = None
        """Called once, before the next step of the scheduler."""

    def step(self) -> None:
        if self.on_next is not None:
            self.on_next()
            self.on_next = None
        self._epochs += 1
        plateau = isinstance(self._schedule, lr_scheduler.ReduceLROnPlateau)
        self._schedule.step(self._epochs) if plateau else self._schedule.step()
