"""Two runs in one process, each with its own `attach`: to which of them a loss belongs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sentinel
from sentinel.hooks.loop.step_accumulator import RIVALS_STEPS
from tests.hooks.conftest import FakeDaemon

STEPS = 8


@pytest.fixture
def daemons(private_places: Path) -> Iterator[list[FakeDaemon]]:
    """Two fake daemons, one for each run."""
    made = [FakeDaemon(private_places / f"{name}.sock") for name in "ab"]
    yield made
    for daemon in made:
        daemon.close()


@pytest.mark.parametrize("cleared", ["at the top", "before each pass"])
def test_a_gan_has_a_loss_for_each_net_and_they_are_rivals(daemons: list[FakeDaemon], cleared: str) -> None:
    """The generator's loss goes through the critic, which steps first."""
    generator, critic = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (generator, critic)]
    with (
        sentinel.attach(generator, optimizers[0], address=daemons[0].address),
        sentinel.attach(critic, optimizers[1], address=daemons[1].address),
    ):
        for _ in range(STEPS):
            fake = generator(torch.randn(8, 4))
            optimizers[1].zero_grad()
            if cleared == "at the top":
                optimizers[0].zero_grad()
            (critic(torch.randn(8, 2)).mean() + critic(fake.detach()).mean() + 100).backward()
            optimizers[1].step()
            if cleared == "before each pass":
                optimizers[0].zero_grad()
            (critic(fake).mean() + 10).backward()
            optimizers[0].step()
    for daemon, usual in zip(daemons, (10, 100), strict=True):
        daemon.ended()
        assert all(abs(loss - usual) < 5 for seq, loss in daemon.series("loss").items() if seq > 1)
        assert len(daemon.series("rival_loss")) >= STEPS - 3


def test_models_that_train_beside_each_other_are_no_rivals(daemons: list[FakeDaemon]) -> None:
    nets = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in nets]
    with (
        sentinel.attach(nets[0], optimizers[0], address=daemons[0].address),
        sentinel.attach(nets[1], optimizers[1], address=daemons[1].address),
    ):
        for _ in range(STEPS):
            outputs = [net(torch.randn(8, 4)).mean() for net in nets]
            for optimizer in optimizers:
                optimizer.zero_grad()
            for which, optimizer in enumerate(optimizers):
                (outputs[which] + 100 * which).backward()
                optimizer.step()
    for which, daemon in enumerate(daemons):
        daemon.ended()
        assert all(abs(loss - 100 * which) < 10 for seq, loss in daemon.series("loss").items() if seq > 1)
        assert daemon.series("rival_loss") == {}


def test_a_batch_that_one_of_two_loops_skips_makes_them_no_rivals(daemons: list[FakeDaemon]) -> None:
    nets = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in nets]
    with (
        sentinel.attach(nets[0], optimizers[0], address=daemons[0].address),
        sentinel.attach(nets[1], optimizers[1], address=daemons[1].address),
    ):
        for number in range(STEPS):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(torch.randn(8, 4)).mean().backward()
                if optimizer is optimizers[1] or number != STEPS // 2:
                    optimizer.step()
    for daemon in daemons:
        daemon.ended()
        assert daemon.series("rival_loss") == {}


@pytest.mark.slow
def test_a_net_that_no_longer_trains_through_the_other_is_judged_alone_again(daemons: list[FakeDaemon]) -> None:
    generator, critic = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (generator, critic)]
    with (
        sentinel.attach(generator, optimizers[0], address=daemons[0].address),
        sentinel.attach(critic, optimizers[1], address=daemons[1].address),
    ):
        for number in range(RIVALS_STEPS + 10):
            optimizers[1].zero_grad()
            critic(torch.randn(8, 2)).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            fake = generator(torch.randn(8, 4))
            (critic(fake) if number < 3 else fake).mean().backward()
            optimizers[0].step()
    for daemon in daemons:
        daemon.ended()
        rivals = daemon.series("rival_loss")
        assert rivals
        assert max(rivals) < max(daemon.series("loss"))
