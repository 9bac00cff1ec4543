"""State for the disk is taken when the loop is done with a step: after an evaluation and the scheduler's step that
follows it, and before the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import wire
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

DATA = TensorDataset(torch.cat([*batches(4)]))
"""Four batches of eight: an epoch."""
HELD_OUT = TensorDataset(torch.cat([*batches(2, seed=2)]))
EPOCHS = 3
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
"""A scaler that is passed explicitly, so that none of another test is found."""


class Counter:
    """Counts batches, as users count samples: at the beginning of an iteration."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Script:
    """A training script whose ReduceLROnPlateau gets the loss of an evaluation."""

    def __init__(self) -> None:
        self.net, self.counter = model(), Counter()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-2)
        self.scheduler = lr_scheduler.ReduceLROnPlateau(self.optimizer)
        self.loader: Iterable[Any] = DataLoader(DATA, batch_size=8, shuffle=True)

    def train_on(self, batch: Tensor) -> None:
        self.counter.seen += 1
        self.optimizer.zero_grad()
        loss_of(self.net, batch).backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            loss = sum(float(loss_of(self.net, x)) for (x,) in DataLoader(HELD_OUT, batch_size=8))
        self.net.train()
        self.scheduler.step(loss)

    def evaluate_by_gradients_only(self) -> None:
        """Leave the model in training mode, as where it has neither dropout nor batch norm."""
        with torch.no_grad():
            self.scheduler.step(float(loss_of(self.net, DATA.tensors[0])))

    def evaluate_by_mode_only(self) -> None:
        """Leave gradients on: an attack on the model needs them."""
        self.net.eval()
        self.scheduler.step(float(loss_of(self.net, DATA.tensors[0]).detach()))
        self.net.train()


def train_without_loader(evaluate: Callable[[Script], None], script: Script) -> Iterator[None]:
    for batch in batches(12):
        script.train_on(batch)
        evaluate(script)
        yield


def train_by_loader(script: Script) -> Iterator[None]:
    for _ in range(EPOCHS):
        for (batch,) in script.loader:
            script.train_on(batch)
            script.evaluate()
            yield


def train_by_epochs(script: Script) -> Iterator[None]:
    for _ in range(EPOCHS):
        for (batch,) in script.loader:
            script.train_on(batch)
            yield
        script.evaluate()


LOOPS: dict[str, tuple[Callable[[Script], Iterator[None]], bool, int]] = {
    "no loader": (lambda script: train_without_loader(Script.evaluate, script), False, 4),
    "no loader, gradients": (lambda script: train_without_loader(Script.evaluate_by_gradients_only, script), False, 4),
    "no loader, mode": (lambda script: train_without_loader(Script.evaluate_by_mode_only, script), False, 4),
    "loader": (train_by_loader, False, 4),
    "epochs": (train_by_epochs, False, 1),
    "epochs of monitor.batches": (train_by_epochs, True, 1),
}
"""Name -> the loop, whether it iterates over `monitor.batches`, and the scheduler's steps in four of the optimizer."""


@pytest.mark.parametrize("kind", LOOPS)
def test_an_evaluation_before_the_schedulers_step_is_not_the_next_batch(
    kind: str, daemon: FakeDaemon, tmp_path: Path
) -> None:
    loop, wrapped, scheduled = LOOPS[kind]
    script = Script()
    terms = sentinel.Rollback(every=1, keep=6, margin=1, directory=tmp_path, state={"counter": script.counter})
    with sentinel.attach(
        script.net, script.optimizer, scheduler=script.scheduler, scaler=NO_SCALER, rollback=terms
    ) as monitor:
        if wrapped:
            script.loader = monitor.batches(script.loader)
        for step, _ in enumerate(loop(script)):
            if step == 3:
                weights = script.net[0].weight.detach().clone()
            if step == 5:
                break
        daemon.wait(lambda: [taken for taken in daemon.of(wire.SnapshotTaken) if taken.seq == 3])
        daemon.send(wire.Publish(id=1, seq=3, step=3, run="r", run_id="r-1", attempt=0))
        daemon.wait(lambda: daemon.of(wire.Published))
    assert [(answer.ok, answer.reason) for answer in daemon.of(wire.Published)] == [(True, "")]

    again = Script()
    step = sentinel.resume(
        again.net, again.optimizer, scheduler=again.scheduler, scaler=NO_SCALER, directory=tmp_path,
        state={"counter": again.counter},
    )  # fmt: skip
    assert step == 4
    assert torch.equal(again.net[0].weight, weights)
    assert again.scheduler.last_epoch == scheduled
    assert again.counter.seen == (5 if "no loader" in kind else 4)
