"""Learning rates that are lowered after a rollback, where a step raises and the loop goes on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import sentinel
from sentinel import wire
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

RAISES = 8


class Failing(torch.optim.AdamW):
    """Has no memory left at step `RAISES`."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.used = float(self.param_groups[0]["lr"])
        if self.calls == RAISES + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)


class Whole(Failing):
    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def train(net: nn.Module, optimizer: Failing, scheduler: Any, count: int) -> tuple[list[float], list[float]]:
    """Return the rate after each step, before the scheduler's, and the rate in each step."""
    after, inside = [], []
    for batch in batches(count):
        optimizer.zero_grad()
        loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
        after.append(float(optimizer.param_groups[0]["lr"]))
        inside.append(optimizer.used)
        if scheduler is not None:
            scheduler.step()
    return after, inside


SCHEDULERS: dict[str, Callable[[Failing], Any]] = {
    "recursive": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "fresh": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
}


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_step_that_raises_leaves_the_rate_as_the_schedule_has_it(
    kind: str, tensor: bool, late: bool, daemon: FakeDaemon
) -> None:
    """`late`: the scheduler is made after the rollback."""
    net, twin = model(), Failing(model().parameters(), lr=0.01)
    optimizer = Failing(net.parameters(), lr=torch.tensor(0.01) if tensor else 0.01)
    scheduler, schedule = (None, None) if late else (SCHEDULERS[kind](optimizer), SCHEDULERS[kind](twin))
    own = vars(optimizer).get("step")
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=1)):
        train(net, optimizer, scheduler, 3)
        daemon.wait(lambda: [taken for taken in daemon.of(wire.SnapshotTaken) if taken.seq == 2])
        daemon.send(wire.Prepare(id=1, at=3, to=2))
        daemon.wait(lambda: daemon.of(wire.Prepared))
        daemon.send(wire.Commit(id=1, lr_factor=0.5))
        train(net, optimizer, scheduler, 2)
        train(model(), twin, schedule, 4)  # one step was undone, with the scheduler's
        twin.calls = optimizer.calls
        if late:
            scheduler, schedule = SCHEDULERS[kind](optimizer), SCHEDULERS[kind](twin)
        after, inside = train(net, optimizer, scheduler, 6)
    expected, _ = train(model(), twin, schedule, 6)
    assert optimizer.calls > RAISES
    assert after == pytest.approx(expected)
    assert inside == pytest.approx([rate * 0.5 for rate in expected])
    assert late or vars(optimizer).get("step") is own


def test_a_copy_of_the_optimizer_steps_its_own_weights(daemon: FakeDaemon) -> None:
    """Its class copies and pickles all attributes: `step` is one, after the rollback."""
    net = model()
    optimizer = Whole(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=1)):
        train(net, optimizer, None, 3)
        daemon.wait(lambda: [taken for taken in daemon.of(wire.SnapshotTaken) if taken.seq == 2])
        daemon.send(wire.Prepare(id=1, at=3, to=2))
        daemon.wait(lambda: daemon.of(wire.Prepared))
        daemon.send(wire.Commit(id=1, lr_factor=0.5))
        train(net, optimizer, None, 2)
        before = net[0].weight.detach().clone()
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            weight = other.param_groups[0]["params"][0]
            weight.grad = torch.ones_like(weight)
            other.step()
            assert not torch.equal(weight, before)
            assert torch.equal(net[0].weight, before)
    assert daemon.of(wire.RolledBack)[0].ok
