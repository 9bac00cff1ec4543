"""What is reported about a batch, and about how a model is trained on it."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sentinel
from sentinel import wire
from sentinel.hooks.core import governor
from sentinel.hooks.loop import batches
from sentinel.hooks.loop.batches import BURST, BatchFingerprints, identity_of
from sentinel.signals import SIGNALS
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import loss_of, model


class Loader:
    """Stands in for the loader that a batch comes from."""


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for (batch,) in loader:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()


def test_the_batch_of_each_step_has_an_identity_and_a_shape(daemon: FakeDaemon) -> None:
    data = torch.randn(40, 6)
    data[24:32] = data[8:16]  # the fourth batch is the second one again
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        train(net, optimizer, DataLoader(TensorDataset(data), batch_size=8))
    daemon.ended()
    identity = daemon.series("batch_identity")
    assert list(identity) == list(range(5))
    assert identity[1] == identity[3]
    assert len(set(identity.values())) == 4
    assert list(daemon.series("batch_repeated").values()) == [0, 0, 0, 1, 0]
    for signal, value in (("batch_size", 8), ("batch_length", 6), ("batch_elements", 48)):
        assert set(daemon.series(signal).values()) == {value}


def test_the_batches_of_another_epoch_are_no_repeats(daemon: FakeDaemon) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16, 6)), batch_size=8)
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for _ in range(3):
            train(net, optimizer, loader)
        for _ in range(3):  # broken off: it does not come to its end
            train(net, optimizer, ([next(iter(loader))[0]] for _ in range(1)))
    daemon.ended()
    assert list(daemon.series("batch_repeated").values()) == [0.0] * 9


class EveryWorkerAllOfIt(IterableDataset[torch.Tensor]):
    """A stream that is not divided among the workers: each yields all of it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        yield from (torch.randn(6, generator=generator) for _ in range(32))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of one core
def test_workers_that_give_the_same_batches_repeat_them(daemon: FakeDaemon) -> None:
    loader = DataLoader(EveryWorkerAllOfIt(), batch_size=8, num_workers=2)
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        train(net, optimizer, ((batch,) for batch in loader))
    daemon.ended()
    assert list(daemon.series("batch_repeated").values()) == [0.0, 1.0] * 4


def test_an_iterable_of_ones_own_is_looked_at_through_the_monitor(daemon: FakeDaemon) -> None:
    def loader() -> Iterator[tuple[torch.Tensor]]:
        yield from ((torch.randn(4, 6),) for _ in range(3))

    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer) as monitor:
        train(net, optimizer, monitor.batches(list(loader())))
    daemon.ended()
    assert set(daemon.series("batch_size").values()) == {4.0}
    assert len(set(daemon.series("batch_identity").values())) == 3


class TensorDict(Mapping[str, Any]):
    """Holds its tensors as the class of this name in tensordict does. None of its methods may be called."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._tensordict = held

    def __getitem__(self, key: str) -> Any:
        raise AssertionError

    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda t: t,
        lambda t: (t, 3, "text"),
        lambda t: {"input_ids": t, "labels": None},
        lambda t: UserDict(input_ids=t),
        lambda t: TensorDict({"deep": TensorDict({"observation": t})}),
        lambda t: [{"deep": (t,)}],
    ],
    ids=["tensor", "tuple", "dict", "batch-encoding", "TensorDict", "nested"],
)
def test_a_batch_of_any_form_is_looked_into(wrapped: Any) -> None:
    found = BatchFingerprints().describe_batch(wrapped(torch.ones(2, 3, 5)), Loader())
    assert found is not None
    assert (found["batch_size"], found["batch_length"], found["batch_elements"]) == (2.0, 3.0, 30.0)


def test_an_object_that_is_no_batch_has_no_fingerprint() -> None:
    for batch in (None, 3, "text", [], {"a": 1}, MappingProxyType({"a": 1})):
        assert BatchFingerprints().describe_batch(batch, Loader()) is None
    assert "batch_identity" not in (
        BatchFingerprints().describe_batch(torch.ones(3, device="meta"), Loader()) or {}
    )  # not in host memory


def test_the_identity_is_of_type_shape_and_elements() -> None:
    one = torch.arange(200.0)
    same = identity_of([one])
    assert same == identity_of([one.clone()])
    others = [one.double(), one.reshape(20, 10), one + 1, torch.arange(201.0), torch.cat([one[:-8], one[-8:] + 1])]
    assert len({same, *(identity_of([other]) for other in others)}) == 6
    assert identity_of([one[::2]]) is None  # with gaps in memory it would have to be copied as a whole
    assert same is not None
    assert same < 1 << 48  # a float64 holds it


@pytest.mark.parametrize("size", [64, 96, 128])
def test_batches_with_a_column_in_common_are_no_repeats(daemon: FakeDaemon, size: int) -> None:
    """Each sequence begins with the same token, and each picture has a dark edge."""
    tokens = torch.randint(1000, (4 * size, 256))
    tokens[:, 0] = 1
    pictures = torch.zeros(4 * size, 1, 28, 28)
    pictures[:, :, 4:24, 4:24] = torch.rand(4 * size, 1, 20, 20)
    for data in (tokens, pictures, pictures.to(memory_format=torch.channels_last)):
        assert len({identity_of([batch]) for batch in data.split(size)}) == 4
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for (batch,) in DataLoader(TensorDataset(tokens), batch_size=size):
            optimizer.zero_grad()
            loss_of(net, batch[:, :6] / 1000).backward()
            optimizer.step()
    daemon.ended()
    assert list(daemon.series("batch_repeated").values()) == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.complex128])
def test_batches_of_any_type_have_an_identity(dtype: torch.dtype) -> None:
    one, other = (torch.randint(2, (40, 30)).to(dtype) for _ in range(2))
    assert identity_of([one]) == identity_of([one.clone()])
    assert identity_of([one]) != identity_of([other])


def test_no_batch_is_looked_at_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(batches.time, "perf_counter", lambda: clock[0])
    looking, batch, source = BatchFingerprints(), torch.ones(2), Loader()
    assert sum(looking.describe_batch(batch, source) is not None for _ in range(BURST)) == BURST
    assert sum(looking.describe_batch(batch, source) is not None for _ in range(100)) == 0
    clock[0] += batches.SPACING_SECONDS
    assert looking.describe_batch(batch, source) is not None
    assert looking.describe_batch(batch, source) is None


@pytest.mark.faults
def test_a_batch_that_cannot_be_looked_at_costs_only_its_identity(
    daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "identity_of", lambda _: 1 / 0)
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        train(net, optimizer, DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=8))
    daemon.ended()
    assert list(daemon.series("data_seconds")) == [0, 1, 2]
    assert daemon.series("batch_size") == {}
    assert len(swallowed) == 1


def test_contents_do_not_leave_the_process(daemon: FakeDaemon) -> None:
    data = torch.full((8, 6), 123456.789)
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        train(net, optimizer, DataLoader(TensorDataset(data), batch_size=8))
    daemon.ended()
    told = {
        value
        for batch in daemon.of(wire.Batch)
        for c in batch.columns.values()
        for value in wire.unpack_column("d", c.values)
    }
    assert not any(abs(value - 123456.789) < 1.0 for value in told)


def test_a_model_that_trains_in_evaluation_mode(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for step in range(4):
            net.train(step != 2)
            with torch.no_grad():
                net.eval() if step == 3 else None
                net(torch.randn(2, 6))  # an evaluation between two steps does not count
                net.train(step != 2)
            optimizer.zero_grad()
            loss_of(net, torch.randn(8, 6)).backward()
            optimizer.step()
    daemon.ended()
    assert daemon.series("eval_mode") == {2: 1.0}


def test_the_mode_of_the_module_inside_a_wrapper_counts(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    wrapped = nn.DataParallel(net)
    with sentinel.attach(wrapped, optimizer):
        for inside, outside in ((True, True), (True, False), (False, True), (False, False)):
            net.training, wrapped.training = inside, outside
            optimizer.zero_grad()
            loss_of(wrapped, torch.randn(8, 6)).backward()
            optimizer.step()
    daemon.ended()
    assert daemon.series("eval_mode") == {2: 1.0, 3: 1.0}


def test_parameters_that_get_no_gradient_are_counted(daemon: FakeDaemon) -> None:
    net = nn.ModuleDict({"used": nn.Linear(6, 1), "unused": nn.Linear(3, 3), "frozen": nn.Linear(2, 2)})
    net["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        loss_of(net["used"], torch.randn(8, 6)).backward()
        optimizer.step()
    daemon.ended()
    assert daemon.series("parameters_without_gradient") == {0: 2.0}
    assert daemon.series("without_gradient_share") == {0: pytest.approx(12 / 19)}


def test_a_step_without_any_gradient_is_seen_wherever_the_norm_would_be(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(governor, "FIRST", {0: 1, 1: 1, 2: 256, 3: 256})
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        for _ in range(4):
            loss_of(net, torch.randn(8, 6)).backward()
            optimizer.step()
    daemon.ended()
    assert daemon.series("no_gradient") == dict.fromkeys(range(4), 1.0)


def test_passes_inside_a_closure_do_not_count_as_the_optimizers_time(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        output = net(torch.randn(8, 6))
        output.register_hook(lambda gradient: time.sleep(0.2))
        loss: torch.Tensor = output.square().mean()
        loss.backward()
        return loss

    with sentinel.attach(net, optimizer):
        optimizer.step(closure)
        optimizer.step(closure)
    daemon.ended()
    backward, own = daemon.series("backward_seconds")[1], daemon.series("optimizer_seconds")[1]
    assert backward >= 0.2
    assert own < backward


def test_every_value_of_a_batch_is_in_the_vocabulary() -> None:
    found = BatchFingerprints().describe_batch(torch.ones(2, 2), Loader())
    assert found is not None
    assert {SIGNALS[name].scope for name in found} == {"rank"}
