"""Pairs of independent faults, planted one after the other in one run.

Alerts of one problem share a page, and alerts that are consequences get none: a pair's faults are different problems.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.faults.fault import Fault, Trial
from tests.faults.models import images

ONSET, AFTERWARDS = 320, 600
"""The step at which the first fault begins, and the number of steps after the second begins."""
APART = 5, 50, 500
GB = 1e9


class Plant(NamedTuple):
    """One fault of a pair."""

    alert: str
    cause: str
    """Pattern of the cause, as in `Fault`."""


PLANTS = {
    "eval": Plant("TrainingInEvalMode", "model.eval\\(\\)"),
    "labels": Plant("Divergence", "data are others since step NEAR"),
    "state": Plant("OptimizerStateLost", "zeroed or overwritten between steps"),
    "rate": Plant("LearningRateJump", "it jumped from 0.001 to 0.25 at step NEAR"),
    "zero": Plant("SchedulerMisused", "fell from 0.001 to 0 at step NEAR"),
    "nan": Plant("NonFiniteLoss", "bad data: .* of the batch of step ONSET"),
    "clip": Plant("AlwaysClipping", "limit of 0.001 lies under the usual"),
    "memory": Plant("Fragmentation", "in pieces that fit no request"),
}
"""Name -> fault. `memory` has made-up figures of a caching allocator."""

PAIRS = (
    ("eval", "labels"), ("eval", "state"), ("eval", "rate"), ("eval", "nan"), ("eval", "memory"), ("eval", "zero"),
    ("memory", "labels"), ("memory", "state"), ("memory", "rate"), ("memory", "nan"), ("memory", "eval"),
    ("memory", "zero"), ("memory", "clip"), ("zero", "eval"), ("zero", "memory"), ("zero", "nan"),
    ("labels", "eval"), ("labels", "memory"), ("state", "eval"), ("rate", "memory"),
)  # fmt: skip
"""The pairs (first, second); a NaN is never the first, because no fault after it could be seen."""


def train_with_both(first: str, second: str, apart: int, trial: Trial) -> None:
    """Train an ordinary classifier, with each of the two faults on from its step on."""
    begins = {first: ONSET, second: ONSET + apart}

    def is_on(plant: str, step: int) -> bool:
        return trial.faulty and step >= begins.get(plant, 1 << 30)

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.0 if is_on("zero", step) else 250.0 if is_on("rate", step) else 1.0
    )
    monitor = trial.attach(model, optimizer)
    for (step, _), (x, y) in zip(trial.steps(ONSET + apart + AFTERWARDS, ONSET), images(trial.seed), strict=False):
        model.train(not is_on("eval", step))
        if is_on("labels", step):
            y = y[torch.randperm(len(y))]
        if is_on("nan", step):
            x = x.clone().fill_(torch.nan)
        if is_on("state", step) and step == begins["state"]:
            for state in optimizer.state.values():
                state["exp_avg_sq"].zero_()
        if "memory" in begins and step % 8 == 0:
            pieces = 19 * GB if is_on("memory", step) else 1 * GB
            monitor.log(
                memory_allocated_bytes=18 * GB, memory_reserved_bytes=45 * GB, memory_inactive_split_bytes=pieces
            )
        optimizer.zero_grad()
        F.cross_entropy(model(x + 0.3 * torch.randn_like(x)), y).backward()  # noise, so that they are not memorised
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if is_on("clip", step) else 10.0)
        optimizer.step()
        scheduler.step()


def make_pair(first: str, second: str, apart: int) -> Fault:
    """Return a pair as a `Fault`, with the alert and cause of the fault that begins first."""
    plant = PLANTS[first]
    return Fault(
        id=f"{first} {second} {apart}", what=f"{first}, and {second} {apart} steps later", alert=plant.alert,
        signal="loss", delay=0, loop=functools.partial(train_with_both, first, second, apart), cause=plant.cause,
    )  # fmt: skip


FAULTS = tuple(make_pair(first, second, apart) for apart in APART for first, second in PAIRS)
