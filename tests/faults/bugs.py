"""Bugs of the loop that raise nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, images


def overwritten(trial: Trial) -> None:
    """B1: each step is undone, as where the model is loaded again from an average that nobody updates."""
    model = classifier()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if trial.faulty:
        optimizer.register_step_post_hook(lambda *_: model.load_state_dict(average))
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(600), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def other_parameters(trial: Trial) -> None:
    """B1: the optimizer holds what is frozen, and not what is to be trained. (One that holds tensors of no model at
    all is refused by `attach`.)"""
    model = classifier()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam((model[:4] if trial.faulty else model[4:]).parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(100), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def evaluating(trial: Trial) -> None:
    """B5: an evaluation leaves the model in evaluation mode."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, _), (x, y) in zip(trial.steps(200, 100), images(trial.seed), strict=False):
        if step % 50 == 0:
            model.eval()
            with torch.no_grad():
                model(x)
            if not (trial.faulty and step >= 100):
                model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def never_scheduled(trial: Trial) -> None:
    """B6: a warm-up from 0, whose scheduler is never stepped."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 50))
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(200), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not on:
            scheduler.step()


class TwoHeads(nn.Module):
    """A second head, which the loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.spare = classifier(), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, *, whole: bool) -> torch.Tensor:
        x = self.trunk(x)
        return self.head(x) + self.spare(x) if whole else self.head(x)


def left_out(trial: Trial) -> None:
    """B7: a head that is never called."""
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(300), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x, whole=not on), y).backward()
        optimizer.step()


FAULTS = (
    Fault(
        id="B1", what="each step is undone", alert="ParametersNotUpdated", signal="update_ratio", delay=20,
        loop=overwritten, cause="undone within the step", names=("0\\.weight",),
    ),
    Fault(
        id="B1 others", what="the optimizer holds other parameters", alert="ParametersNotUpdated", signal="no_gradient",
        delay=20, loop=other_parameters, cause="holds 4 parameter.*in no optimizer \\(4.weight, 4.bias\\)",
        names=("unfreeze",),
    ),
    Fault(
        id="B5", what="trains in evaluation mode", alert="TrainingInEvalMode", signal="eval_mode", delay=5,
        loop=evaluating, cause="model.eval\\(\\)", names=("BatchNorm1d", "Dropout"),
    ),
    Fault(
        id="B6", what="the scheduler is never stepped", alert="SchedulerMisused", signal="learning_rate", delay=20,
        loop=never_scheduled, cause="rate has been 0 since the first step", names=("scheduler.step\\(\\)",),
    ),
    Fault(
        id="B7", what="a head that is never called", alert="UnusedParameters", signal="parameters_without_gradient",
        delay=20, loop=left_out, cause="spare.weight", names=("find_unused_parameters",),
    ),
)  # fmt: skip
