"""State that needs a collective to be read is refused by name, without issuing it: ranks would wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import sentinel
from sentinel import wire
from tests.hooks import loops
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import fit

COLLECTIVES: dict[str, Callable[[], object]] = {
    "c10d.allreduce_": lambda: dist.all_reduce(torch.ones(1)),
    "c10d.barrier": dist.barrier,
    "c10d.allgather_": lambda: dist.all_gather_object([None], "state"),
    "_c10d_functional.all_reduce": lambda: functional.all_reduce(
        torch.ones(1), "sum", dist.distributed_c10d._get_default_group()
    ).sum(),
}


@pytest.fixture
def count_collectives() -> Iterator[Callable[[], int]]:
    """The number of collectives that a group of one rank has issued, by the number that it gives to each."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    yield group._get_sequence_number_for_group
    dist.destroy_process_group()


class GatheringModel(nn.Sequential):
    def __init__(self, gather: Callable[[], object]) -> None:
        super().__init__(loops.model())
        self.gather = gather

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.gather()
        return super().state_dict(*args, **kwargs)


class GatheringSGD(torch.optim.SGD):
    def __init__(self, parameters: Any, gather: Callable[[], object], *, late: bool = False) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self._gather, self._late = gather, late

    def state_dict(self) -> Any:
        if self.state or not self._late:
            self._gather()
        return super().state_dict()


class GatheringAverage:
    """An object of the user's with state, as `Rollback(state=)` takes it."""

    def __init__(self, gather: Callable[[], object]) -> None:
        self.gather = gather

    def state_dict(self) -> Any:
        self.gather()
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("owner", ["GatheringModel", "GatheringSGD", "GatheringAverage"])
def test_state_that_needs_a_collective_is_refused(
    owner: str,
    collective: str,
    daemon: FakeDaemon,
    count_collectives: Callable[[], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    gather = COLLECTIVES[collective]
    net = GatheringModel(gather) if owner == "GatheringModel" else loops.model()
    optimizer = GatheringSGD(net.parameters(), gather) if owner == "GatheringSGD" else loops.sgd(net)
    state = {"ema": GatheringAverage(gather)} if owner == "GatheringAverage" else {}
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0, state=state)):
        fit(net, optimizer, 4)
    daemon.ended()
    assert count_collectives() == 0
    check_named(daemon, owner, collective, capsys.readouterr().err)
    assert daemon.of(wire.Hello)[0].rollback is None
    assert not daemon.of(wire.SnapshotTaken)


@pytest.mark.faults
def test_state_that_needs_a_collective_from_the_first_step_on_is_refused(
    daemon: FakeDaemon, count_collectives: Callable[[], int], swallowed: list[str]
) -> None:
    net = loops.model()
    optimizer = GatheringSGD(net.parameters(), COLLECTIVES["c10d.allreduce_"], late=True)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0)):
        fit(net, optimizer, 4)
    daemon.ended()
    assert count_collectives() == 0
    (logged,) = swallowed
    check_named(daemon, "GatheringSGD", "c10d.allreduce_", logged)
    assert not daemon.of(wire.SnapshotTaken)


def check_named(daemon: FakeDaemon, owner: str, collective: str, shown: str) -> None:
    """Check that the state is named, in the terminal and to the daemon, whose status shows it."""
    hello = daemon.of(wire.Hello)[-1]
    assert hello.rollback is None
    (unseen,) = [text for text in hello.unseen if text.startswith("rollback (disarmed: ")]
    for text in (shown, unseen):
        assert f"the state of {owner}: its state_dict() raised" in text
        assert f"it issues a collective ({collective}" in text
