"""How far the training loader is in its pass: the batches it has given, and its length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

import sentinel
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.step_accumulator import LoaderProgress, StepAccumulator
from tests.hooks.conftest import FakeDaemon

DATA = TensorDataset(torch.zeros(20, 2))


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Drawing(RandomSampler):
    """A sampler that draws numbers to compute its length."""

    def __len__(self) -> int:
        raise AssertionError("asked")


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, batch_size=3), 7),
        (DataLoader(DATA, batch_size=3, drop_last=True, shuffle=True), 6),
        (DataLoader(DATA, batch_size=None), 20),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=3, rank=0), batch_size=2), 4),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)), 5),
        (DataLoader(Endless(), batch_size=2), -1),
        (DataLoader(DATA, sampler=Drawing(DATA), batch_size=2), -1),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), -1),
    ],
    ids=["plain", "drop-last", "unbatched", "distributed", "batch-sampler", "iterable", "own-sampler", "list"],
)
def test_the_length_of_a_pass_where_torch_knows_it(loader: Any, expected: int) -> None:
    loader_progress, accumulator = LoaderProgress(), StepAccumulator()
    for source in (iter(loader), iter(Batches(accumulator).watch(loader))):
        loader_progress.count_batch(source)
        assert loader_progress.length == -1, "nothing has trained"
        loader_progress.training = loader_progress.last
        assert loader_progress.length == expected
        loader_progress = LoaderProgress()


def test_an_evaluation_is_no_part_of_a_pass_and_the_end_of_a_pass_gives_its_length() -> None:
    loader_progress = LoaderProgress()
    training, evaluation = iter(DataLoader(Endless())), iter(DataLoader(Endless()))
    for step in range(7):
        loader_progress.count_batch(training)
        loader_progress.training = loader_progress.last
        if step == 3:
            for _ in range(2):
                loader_progress.count_batch(evaluation)
            loader_progress.record_end(evaluation)
            assert (loader_progress.batches, loader_progress.exhausted, loader_progress.length) == (4, False, -1)
    loader_progress.record_end(training)
    loader_progress.count_batch(evaluation)
    assert (loader_progress.batches, loader_progress.exhausted, loader_progress.length) == (7, True, 7)
    loader_progress.count_batch(training)  # its workers persist
    assert (loader_progress.batches, loader_progress.exhausted) == (1, False)


def test_a_single_rank_does_not_send_its_loaders_length(daemon: FakeDaemon) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        for (x,) in DataLoader(DATA, batch_size=10):
            net(x).square().mean().backward()
            optimizer.step()
    daemon.ended()
    assert not daemon.series("loader_batches")
