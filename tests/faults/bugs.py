"""Faults: bugs in the loop that raise no exception."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, images

ROUND = 256
"""Steps between two samples of signals that change slowly."""
LATE = 16 * ROUND + 10
"""Steps in which tier 3 is sampled more than twice, even if a busy machine leaves the opening examination no time."""


def overwritten(trial: Trial) -> None:
    """B1: each step is undone, as when the model is loaded again from an average that is never updated."""
    model = classifier()
    average = dict[str, torch.Tensor]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: model.load_state_dict(average) if average else None)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(600), images(trial.seed), strict=False):
        if on and not average:
            average |= {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def other_parameters(trial: Trial) -> None:
    """B1: the optimizer holds the frozen parameters instead of the others.

    (`attach` refuses an optimizer that holds tensors of no model at all.)
    """
    model = classifier()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam((model[:4] if trial.faulty else model[4:]).parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(100), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def last_layer_only(trial: Trial) -> None:
    """B1: the optimizer was made from the last layer's parameters only.

    The twin trains the rest by another optimizer, which steps rarely and is not attached.
    """
    model = classifier()
    optimizer = torch.optim.Adam(model[-1].parameters(), lr=1e-3)
    other = None if trial.faulty else torch.optim.SGD(model[:-1].parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, _), (x, y) in zip(trial.steps(100), images(trial.seed), strict=False):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if other is not None and step % 90 == 89:
            other.step()


def averaging_on(trial: Trial) -> None:
    """B2: a frozen body whose batch norm goes on averaging, because `model.train()` reached it, too."""
    body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model = nn.Sequential(body, nn.ReLU(), nn.Linear(64, 10))
    for x, _ in itertools.islice(images(trial.seed), 50):  # as if trained before
        body(x)
    body.requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(LATE), images(trial.seed), strict=False):
        body.train(on)
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


def scheduled_first(trial: Trial) -> None:
    """B6: the scheduler is stepped before the optimizer, at each step."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(100), images(trial.seed), strict=False):
        if on:
            scheduler.step()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not on:
            scheduler.step()


def schedule_over(trial: Trial) -> None:
    """B6: a schedule to 0 over 100 of 200 steps, as when its length is counted in steps after accumulation."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total = 100 if trial.faulty else 200
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(200, 100), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()


def frozen_late(trial: Trial) -> None:
    """B2: a layer is frozen after the optimizer was made, and the optimizer's weight decay still changes it."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-2)
    trial.attach(model, optimizer)
    zeroed = trial.faulty  # the last gradients are set to 0 instead of None
    for (step, _), (x, y) in zip(trial.steps(LATE, 20), images(trial.seed), strict=False):
        if step == 20:
            for parameter in model[0].parameters():
                parameter.requires_grad_(False)
        optimizer.zero_grad(set_to_none=not zeroed)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def never_cleared(trial: Trial) -> None:
    """B3: zero_grad() is not called."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(100, 1), images(trial.seed), strict=False):
        if not on:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of digits; with `whole`, each worker yields all of them instead of its share."""

    def __init__(self, seed: int, whole: bool) -> None:
        self.seed, self.whole = seed, whole

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        share, of = (worker.id, worker.num_workers) if worker is not None and not self.whole else (0, 1)
        yield from itertools.islice(images(self.seed, 8), share, 220, of)


def same_stream(trial: Trial) -> None:
    """B4: two workers, each of which gives the whole stream."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(trial.seed, whole=trial.faulty), batch_size=None, num_workers=2)
    trial.attach(model, optimizer, loader=loader)
    for (_, _), (x, y) in zip(trial.steps(200), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        time.sleep(0.01)
        optimizer.step()


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Digits with noise from a generator that the data set makes, so that each worker gets a copy of it."""

    def __init__(self, seed: int) -> None:
        self.rows = list(itertools.islice(images(seed, 8), 220))
        self.generator = numpy.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.rows[index]
        return x + 0.1 * torch.from_numpy(self.generator.standard_normal(x.shape)).float(), y


def seed_worker(_: int) -> None:
    """Give this worker's data set a generator of its own."""
    worker = get_worker_info()
    assert worker is not None
    worker.dataset.generator = numpy.random.default_rng(worker.seed)


def same_noise(trial: Trial) -> None:
    """B4: two workers add the same noise to different samples. The twin seeds the generator in each worker."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    prepare = None if trial.faulty else seed_worker
    loader = DataLoader(Noisy(trial.seed), batch_size=None, num_workers=2, worker_init_fn=prepare)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(100), loader, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def summed(trial: Trial) -> None:
    """S7: four micro-batches per step, whose losses are not divided by four."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(Stream(trial.seed, whole=False), batch_size=None)
    trial.attach(model, optimizer, loader=loader)
    batches = iter(loader)
    for _, on in trial.steps(50):
        optimizer.zero_grad()
        for x, y in itertools.islice(batches, 4):
            loss = F.cross_entropy(model(x), y)
            (loss if on else loss / 4).backward()
        optimizer.step()


class TwoHeads(nn.Module):
    """A model with a second head, which the loss may leave out."""

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
        loop=overwritten, cause="undone within the step", names=("0\\.weight",), begins=True,
    ),
    Fault(
        id="B1 others", what="the optimizer holds other parameters", alert="ParametersNotUpdated", signal="no_gradient",
        delay=20, loop=other_parameters, cause="holds 4 parameter.*in no optimizer \\(4.weight, 4.bias\\)",
        names=("unfreeze",),
    ),
    Fault(
        id="B1 part", what="the optimizer has the last layer alone", alert="ParametersNotInOptimizer",
        signal="parameters_outside", delay=6, loop=last_layer_only,
        cause="\\d+ parameter tensors are in no optimizer, \\d+% of the numbers that train: 0\\.weight",
        names=("add_param_group",),
    ),
    Fault(
        id="B2", what="a layer that is frozen, and decays", alert="FrozenParameterChanged", signal="parameter_checksum",
        delay=1, loop=frozen_late, cause="0\\.weight is frozen and changed.*in the optimizer", begins=True,
    ),
    Fault(
        id="B2 statistics", what="a frozen batch norm in training mode", alert="FrozenStatistics",
        signal="frozen_statistics", delay=3, loop=averaging_on, cause="1 normalisations, the first of them 0.1",
        begins=True,
    ),
    Fault(
        id="B3", what="no zero_grad()", alert="GradientsNotCleared", signal="gradients_kept", delay=20,
        loop=never_cleared, cause="not called between the steps, first seen at step \\d+:",
        names=("optimizer.zero_grad\\(\\)",), begins=True,
    ),
    Fault(
        id="B4", what="two workers that give the same", alert="DuplicateBatches", signal="batch_repeated", delay=50,
        loop=same_stream, cause="workers that give the same.* 2 workers", names=("get_worker_info", "seed"),
    ),
    Fault(
        id="B4 noise", what="two workers that add the same noise", alert="RepeatedRandomness",
        signal="copied_generators", delay=1, loop=same_noise, cause="2 workers got a copy of Noisy.generator",
        names=("worker_init_fn",),
    ),
    Fault(
        id="S7", what="a sum of four micro-batches", alert="AccumulationNotNormalised", signal="micro_batches",
        delay=5, loop=summed, cause="sum of 4 micro-batches", names=("\\(loss / 4\\).backward",),
    ),
    Fault(
        id="B5", what="trains in evaluation mode", alert="TrainingInEvalMode", signal="eval_mode", delay=5,
        loop=evaluating, cause="model.eval\\(\\)", names=("BatchNorm1d", "Dropout"),
        begins=True,
    ),
    Fault(
        id="B6", what="the scheduler is never stepped", alert="SchedulerMisused", signal="learning_rate", delay=20,
        loop=never_scheduled, cause="rate has been 0 since the first step",
        names=("scheduler.step\\(\\) once after each optimizer.step\\(\\)",),
    ),
    Fault(
        id="B6 order", what="the scheduler is stepped before the optimizer", alert="SchedulerMisused",
        signal="learning_rate", delay=20, loop=scheduled_first,
        cause="the order: scheduler.step\\(\\) was called before",
        names=("optimizer.step\\(\\); scheduler.step\\(\\)",),
    ),
    Fault(
        id="B6 over", what="a schedule that comes to 0 in mid-run", alert="SchedulerMisused", signal="learning_rate",
        delay=20, loop=schedule_over, cause="schedule is over: .* came to 0 at step 100",
        names=("step it once for each optimizer.step\\(\\)",),
    ),
    Fault(
        id="B7", what="a head that is never called", alert="UnusedParameters", signal="parameters_without_gradient",
        delay=20, loop=left_out, cause="spare.weight", names=("find_unused_parameters",),
    ),
)  # fmt: skip
