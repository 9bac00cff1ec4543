"""Which backward passes count for a step, and with which loss; and that a step gets its own batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sentinel
from sentinel import wire
from sentinel.hooks.core import governor
from sentinel.hooks.loop.batches import BatchFingerprints, identity_of
from sentinel.hooks.measure import probe
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model, sgd
from tests.hooks.sessions import find_session

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, list[float]], None]


@pytest.fixture(autouse=True, params=["whole steps", "fast path"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path that most steps take."""
    if request.param == "fast path":
        monkeypatch.setattr(governor, "FIRST", {0: 4, 1: 8, 2: 8, 3: 256})
        monkeypatch.setattr(governor, "FULL_STEPS", 4)
        monkeypatch.setattr(governor, "SLOW_SECONDS", 60.0)  # on a busy machine any step may take 50 ms
        monkeypatch.setattr(probe, "EARLY", 4)
    return str(request.param)


def trained(step: Step, daemon: FakeDaemon, steps: int = 24) -> list[float]:
    """Train by calling `step` again and again; return the losses as the loop has them."""
    net = model()
    optimizer, losses = sgd(net), list[float]()
    with sentinel.attach(net, optimizer):
        for batch in batches(steps):
            step(net, optimizer, batch, losses)
    daemon.ended()
    return losses


def told(daemon: FakeDaemon) -> list[float]:
    return list(daemon.series("loss").values())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("bad", [1000.0, torch.nan])
def test_a_step_that_the_loop_skips_is_no_part_of_the_next(bad: float, to_none: bool, daemon: FakeDaemon) -> None:
    number, norms = [0], []

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        number[0] += 1
        optimizer.zero_grad(set_to_none=to_none)
        loss = loss_of(net, batch * (bad if number[0] % 7 == 5 else 1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1000.0)
        if norm < 100:
            losses.append(loss.item())
            norms.append(norm.item())
            optimizer.step()

    losses = trained(step, daemon)
    assert len(losses) < 24
    assert told(daemon) == losses
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), rel=1e-5)
    assert set(daemon.series("micro_batches").values()) == {1.0}
    assert not daemon.of(wire.Collected)


def test_a_step_that_is_taken_again_after_an_exception(daemon: FakeDaemon) -> None:
    number = [0]

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        number[0] += 1
        for attempt in range(2):
            try:
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                if attempt == 0 and number[0] % 7 == 5:
                    raise ConnectionError("of the loop's own")
            except ConnectionError:
                continue
            break
        losses.append(loss.item())
        optimizer.step()

    losses = trained(step, daemon)
    assert told(daemon) == losses


def test_losses_of_a_loop_that_always_clears_between_its_passes_all_count(daemon: FakeDaemon) -> None:
    """Such a loop may combine the gradients of several tasks by itself."""

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        taken, total = [], 0.0
        for part in batch.chunk(2):
            optimizer.zero_grad()
            loss = loss_of(net, part)
            loss.backward()
            total += loss.item()
            taken.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        for parameter, *found in zip(net.parameters(), *taken, strict=True):
            parameter.grad = torch.stack(found).mean(0)
        losses.append(total)
        optimizer.step()

    losses = trained(step, daemon)
    assert told(daemon) == losses


def test_micro_batches_count_together(daemon: FakeDaemon) -> None:
    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        optimizer.zero_grad()
        total = 0.0
        for part in batch.chunk(4):
            loss = loss_of(net, part) / 4
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()

    losses = trained(step, daemon)
    assert told(daemon) == losses


def test_a_loss_of_another_model_does_not_count(daemon: FakeDaemon) -> None:
    """The other model trains in the same process, and is not watched."""
    other = nn.Linear(6, 1)
    beside = sgd(other)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        (other(batch).square().mean() + 0.1).backward()
        beside.step()

    losses = trained(step, daemon)
    assert told(daemon) == losses
    assert set(daemon.series("micro_batches").values()) == {1.0}


def test_several_steps_from_one_forward_pass(daemon: FakeDaemon) -> None:
    """A backward pass is the model's even if no forward pass came before it since the last step."""

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = loss_of(net, batch)
            for keep in (True, False):
                optimizer.zero_grad()
                loss.backward(retain_graph=keep)
                losses.append(loss.item())
                optimizer.step()

    losses = trained(step, daemon, steps=8)
    assert told(daemon) == losses


def test_a_loss_is_weighted_as_its_gradient(daemon: FakeDaemon) -> None:
    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        optimizer.zero_grad()
        total = 0.0
        for part in batch.chunk(4):
            loss = loss_of(net, part)
            loss.backward(gradient=torch.tensor(0.25))
            total += loss.item() * 0.25
        losses.append(total)
        optimizer.step()

    losses = trained(step, daemon)
    assert told(daemon) == losses
    assert not daemon.series("unnormalised_passes")


def test_roots_with_weights_of_their_own(daemon: FakeDaemon) -> None:
    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        optimizer.zero_grad()
        roots = [loss_of(net, part) for part in batch.chunk(2)]
        torch.autograd.backward(roots, [torch.tensor(0.25), None])
        losses.append(roots[0].item() * 0.25 + roots[1].item())
        optimizer.step()

    losses = trained(step, daemon)
    assert told(daemon) == pytest.approx(losses)


def test_a_scaled_loss_that_is_divided_in_place(daemon: FakeDaemon) -> None:
    scaler = GradScaler("cpu")

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        scaler.scale(loss).mul_(0.5).backward()
        losses.append(loss.item() * 0.5)
        scaler.step(optimizer)
        scaler.update()

    losses = trained(step, daemon)
    assert told(daemon) == pytest.approx(losses)


def test_a_forward_pass_of_another_thread_does_not_count(daemon: FakeDaemon) -> None:
    """Another thread evaluates while the loop trains, begins within the loop's pass, and would make that shorter."""
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is threading.main_thread():
                inside.set()
                assert go_on.wait(60)
                go_on.clear()
            return x

    net = nn.Sequential(*model(), Waiting())
    optimizer, begun = sgd(net), []

    def evaluate() -> None:
        assert inside.wait(60)
        begun.append(stopwatch._begin)
        with torch.no_grad():
            net(torch.ones(1, 6))
        begun.append(stopwatch._begin)
        go_on.set()

    with sentinel.attach(net, optimizer):
        stopwatch = next(iter(net._forward_pre_hooks.values())).stopwatch
        thread = threading.Thread(target=evaluate)
        thread.start()
        loss_of(net, torch.ones(2, 6)).backward()
        optimizer.step()
        thread.join()
    daemon.ended()
    assert begun[0] == begun[1] > 0


# The batch of a step.


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine every batch."""
    monkeypatch.setattr("sentinel.hooks.loop.batches.SPACING_SECONDS", 0.0)


@pytest.mark.parametrize(("fetched_first", "averaged"), [(True, False), (False, False), (False, True)])
def test_a_batch_of_an_evaluation_is_not_the_next_steps(
    fetched_first: bool, averaged: bool, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for an evaluation of the watched model, and for one of an average of it."""
    monkeypatch.setattr("sentinel.hooks.loop.batches.SPACING_SECONDS", 1e9)
    monkeypatch.setattr("sentinel.hooks.loop.batches.BURST", 0)
    net = model()
    optimizer = sgd(net)
    train = DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=4)
    evaluated = copy.deepcopy(net) if averaged else net
    valid = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)

    def evaluate(contents_of_run: BatchFingerprints) -> None:
        contents_of_run._again_at = 0.0  # the next is examined, and no other after it
        with torch.no_grad():
            for (batch,) in valid:
                evaluated(batch)

    monitor = sentinel.attach(net, optimizer)
    looked = find_session(monitor).batches._contents
    assert looked is not None
    iterator = iter(train)
    for number in range(24):
        if number % 8 == 4 and not fetched_first:
            evaluate(looked)
        (batch,) = next(iterator)
        if number % 8 == 4 and fetched_first:
            evaluate(looked)
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    monitor.detach()
    daemon.ended()
    assert daemon.series("batch_identity").keys() <= {0}


class Endless(IterableDataset[torch.Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from batches(6)


@pytest.mark.usefixtures("every_batch")
def test_a_loop_that_fetches_one_batch_ahead_has_the_identity_of_the_one_it_trains_on(daemon: FakeDaemon) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    net = model()
    optimizer, true = sgd(net), []
    with sentinel.attach(net, optimizer):
        for batch in data_loader.prepare_data_loader(DataLoader(Endless(), batch_size=None), put_on_device=False):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            true.append(float(identity_of([batch]) or 0))
    daemon.ended()
    assert daemon.series("batch_identity") == dict(enumerate(true))
