"""Parameters that get gradients and are in no optimizer are counted while they do not move; no others are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sentinel
from sentinel import wire
from sentinel.hooks.core import governor
from sentinel.hooks.measure.probes.topology import OUTSIDE_SPACING
from sentinel.hooks.torch_interop import discovery
from sentinel.signals import OPENING_STEPS
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model


@pytest.fixture(autouse=True)
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample tier 3, and all others, at every step."""
    monkeypatch.setattr(governor, "FIRST", dict.fromkeys(governor.FIRST, 1))


def sgd(*parts: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.01)


def counted(daemon: FakeDaemon) -> dict[int, float]:
    daemon.ended()
    return daemon.series("parameters_outside")


def test_parameters_outside_are_counted_with_their_share_and_marked_in_the_table(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, sgd(net[3]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(4)
    assert counted(daemon) == {1: 4.0, 2: 4.0, 3: 4.0}  # the first look has nothing to compare with
    sizes = [p.numel() for p in net.parameters()]
    assert daemon.series("outside_share")[1] == pytest.approx(sum(sizes[:4]) / sum(sizes))
    (table,) = daemon.of(wire.LayerTable)
    assert [layer.held for layer in table.layers] == [False] * 4 + [True] * 2


def test_parameters_that_an_optimizer_gets_later_are_counted_no_more(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, sgd(net[3]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(3)
        loop.optimizer.add_param_group({"params": [*net[0].parameters(), *net[2].parameters()]})
        loop.run(3)
    assert counted(daemon) == {1: 4.0, 2: 4.0, 3: 0.0}


def test_parameters_that_are_frozen_or_get_no_gradient_are_not_counted(daemon: FakeDaemon) -> None:
    net = model()
    net[0].requires_grad_(False)
    net.append(nn.Linear(1, 1))  # never called
    inner = net[:4]
    loop = Loop(inner, sgd(net[2], net[3]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(4)
    assert counted(daemon) == {}


def test_parameters_of_another_optimizer_are_not_counted_even_if_that_steps_rarely(daemon: FakeDaemon) -> None:
    net = model()
    other = sgd(net[0], net[2])
    loop = Loop(net, sgd(net[3]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(4)
    other.step()
    assert counted(daemon) == {}


def test_two_attaches_of_one_model_see_each_others_optimizers(daemon: FakeDaemon) -> None:
    net = model()
    first, second = sgd(net[0], net[2]), sgd(net[3])
    with sentinel.attach(net, first, run="a"), sentinel.attach(net, second, run="b"):
        for batch in batches(4):
            loss_of(net, batch).backward()
            first.step()
            second.step()
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 2)
    assert daemon.series("parameters_outside") == {}


@pytest.mark.parametrize("data", [True, False])
def test_parameters_that_the_loop_moves_by_itself_are_not_counted(daemon: FakeDaemon, data: bool) -> None:
    net = model()
    loop = Loop(net, sgd(net[3]))

    def move(_: int) -> None:
        with torch.no_grad():
            for parameter in net[0].parameters():
                (parameter.data if data else parameter).sub_(0.01)
            for parameter in net[2].parameters():
                parameter.add_(0.01)

    with sentinel.attach(net, loop.optimizer):
        loop.run(4, before_step=move)
    assert counted(daemon) == {1: 0.0, 2: 0.0, 3: 0.0}


def test_other_optimizers_are_looked_for_at_first_and_before_a_report(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks, walk = [], discovery.list_steered

    def count() -> frozenset[int]:
        walks.append(1)
        return walk()

    monkeypatch.setattr(discovery, "list_steered", count)
    net = model()
    loop = Loop(net, sgd(net[3]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(6)
    assert len(counted(daemon)) == 5
    assert walks == [1, 1]


def test_looks_that_a_busy_machine_left_no_time_for_are_made_later(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "DECISIONS", (1 << 30,))
    due, late = governor.Governor.due, OPENING_STEPS - 10
    monkeypatch.setattr(
        governor.Governor, "due", lambda self, tier, seq, first=True: seq > late and due(self, tier, seq, first=first)
    )
    monkeypatch.setattr(governor.Governor, "take_rare_turn", lambda self, seq, first=True: False)
    net = model()
    loop = Loop(net, sgd(net[3]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(OPENING_STEPS + 60)
    first = late // OUTSIDE_SPACING * OUTSIDE_SPACING + OUTSIDE_SPACING
    assert counted(daemon) == dict.fromkeys(
        range(first + OUTSIDE_SPACING, first + 5 * OUTSIDE_SPACING, OUTSIDE_SPACING), 4.0
    )


def test_a_gradient_that_an_earlier_stage_left_is_no_gradient(daemon: FakeDaemon) -> None:
    net = model()
    loss_of(net, next(batches(1))).backward()
    optimizer = sgd(net[3])
    with sentinel.attach(net, optimizer):
        for batch in batches(4):
            optimizer.zero_grad()
            with torch.no_grad():
                encoded = net[:3](batch)
            net[3](encoded).square().mean().backward()
            optimizer.step()
    assert counted(daemon) == {1: 0.0, 2: 0.0, 3: 0.0}
