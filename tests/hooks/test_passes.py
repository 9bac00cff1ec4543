"""What is seen around backward passes: gradients that nobody cleared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import sentinel
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

STEPS = 6


def kept(daemon: FakeDaemon) -> list[float]:
    daemon.ended()
    return list(daemon.series("gradients_kept").values())


def train(net: nn.Module, optimizer: torch.optim.Optimizer, clear: Callable[[int], object], passes: int = 1) -> None:
    """`clear(i)` is called before each pass, `i` counting those of a step."""
    data = batches(STEPS * passes)
    with sentinel.attach(net, optimizer):
        for _ in range(STEPS):
            for i in range(passes):
                loss = loss_of(net, next(data))
                clear(i)
                loss.backward()
            optimizer.step()


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_that_nobody_clears(passes: int, daemon: FakeDaemon) -> None:
    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.01), lambda _: None, passes)
    assert kept(daemon) == [1.0] * (STEPS - 1)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_that_are_cleared_once_a_step(to_none: bool, passes: int, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    train(net, optimizer, lambda i: i or optimizer.zero_grad(set_to_none=to_none), passes)
    assert kept(daemon) == [0.0] * (STEPS - 1)


def test_gradients_that_are_replaced_and_those_that_are_0(daemon: FakeDaemon) -> None:
    net = model()

    def replace(_: int) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)

    train(net, torch.optim.SGD(net.parameters(), lr=0.01), replace)
    assert kept(daemon) == [0.0] * (STEPS - 1)


def test_nothing_is_told_of_gradients_that_are_0(daemon: FakeDaemon) -> None:
    net = nn.Linear(6, 1)
    with sentinel.attach(net, (optimizer := torch.optim.SGD(net.parameters(), lr=0.01))):
        for batch in batches(STEPS):
            (net(batch).sum() * 0.0).backward()
            optimizer.step()
    assert kept(daemon) == [0.0] * (STEPS - 1)


def test_the_pass_of_another_model_is_no_sign(daemon: FakeDaemon) -> None:
    """As in a GAN: each optimizer clears before its own passes, and the other one's pass goes through both."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (first, second)]
    with sentinel.attach([first, second], optimizers):
        for batch in batches(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
                loss_of(nn.Sequential(first, second), batch).backward()
                optimizer.step()
    daemon.ended()
    for stream in (0, 1):
        assert set(daemon.series("gradients_kept", stream).values()) == {0.0}


def test_a_scaler_a_closure_and_clipping_are_no_signs(daemon: FakeDaemon) -> None:
    net, scaler = model(), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for batch in batches(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert kept(daemon) == [0.0] * (STEPS - 1)
