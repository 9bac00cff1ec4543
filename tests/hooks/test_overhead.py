"""bench/overhead.py takes Sentinel out of the loop and puts it back: its bare blocks are bare, and nothing breaks."""

from __future__ import annotations

import pytest
import torch

import sentinel
from bench.overhead import Switch
from tests.hooks.conftest import FakeDaemon
from tests.hooks.sessions import list_patches


class Small:
    """The part of the bench's loops that its switch uses."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self) -> None:
        self.model(torch.ones(8, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_bare_block_is_bare_and_what_follows_is_seen(daemon: FakeDaemon, swallowed: list[str]) -> None:
    loop = Small()
    monitor = sentinel.attach(loop.model, loop.optimizer)
    switch = Switch(loop, monitor)  # type: ignore[arg-type]
    for _ in range(3):
        loop.step()
    switch.off()
    assert list_patches() == ()
    for _ in range(10):
        loop.step()
    switch.on()
    for _ in range(3):
        loop.step()
    monitor.detach()
    daemon.ended()
    losses = list(daemon.series("loss").values())
    assert losses == [pytest.approx(losses[0])] * 6, "ten bare passes were added to the next step"
    assert swallowed == []
