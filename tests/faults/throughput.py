"""Faults: lost time, which the loops really lose, by sleeping."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, images


class Decoded(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of digits, each of which takes `seconds` to decode from the batch `slow_from` on."""

    def __init__(self, seed: int, slow_from: int, seconds: float) -> None:
        self.seed, self.slow_from, self.seconds = seed, slow_from, seconds

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, batch in enumerate(images(self.seed)):
            if number >= self.slow_from:
                time.sleep(self.seconds)
            yield batch


def waiting(trial: Trial) -> None:
    """T1: decoding takes as long as the rest of the step, in the training process."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    slow_from = trial.find_onset(150) if trial.faulty else 1 << 30
    loader = DataLoader(Decoded(trial.seed, slow_from, 0.015), batch_size=None)
    trial.attach(model, optimizer, loader=loader)
    for (_, _), (x, y) in zip(trial.steps(240, 150), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        time.sleep(0.003)
        optimizer.step()


def held_up(trial: Trial) -> None:
    """T4: from a step on, the loop has 80 ms more work, such as a metric over all data so far."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(360, 310), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if on:
            time.sleep(0.08)


def in_data_parallel(trial: Trial) -> None:
    """T6: nn.DataParallel, which works on a CPU too, without devices."""
    model: nn.Module = classifier()
    model = nn.DataParallel(model) if trial.faulty else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(50), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


FAULTS = (
    Fault(
        id="T1", what="decoding in the training process", alert="InputBound", signal="data_seconds", delay=50,
        loop=waiting, cause="waiting for data.*no workers", names=("num_workers", "CPUs of the host"),
        own_pace=True, begins=True,
    ),
    Fault(
        id="T4", what="80 ms more in the loop", alert="SlowStep", signal="step_seconds", delay=50,
        loop=held_up, cause="the loop's own code", names=("grew from",),
        own_pace=True, begins=True,
    ),
    Fault(
        id="T6", what="nn.DataParallel", alert="DataParallelInUse", signal="data_parallel_devices", delay=1,
        loop=in_data_parallel, cause="nn.DataParallel", names=("DistributedDataParallel",),
    ),
)  # fmt: skip
