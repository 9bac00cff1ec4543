"""Random generators of a data set that are copied into its loader's workers."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info

import sentinel
from sentinel import wire
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.worker_generators import list_copied_generators
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import loss_of, model


class Noisy(Dataset[torch.Tensor]):
    """A data set that draws from its generator for each sample."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.generator.normal() for _ in range(6)], dtype=torch.float32)


class Quiet(Noisy):
    """Has a generator, and draws nothing once it is made."""

    def __init__(self, generator: Any) -> None:
        super().__init__(generator)
        self.shift = self.generator.normal()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), self.shift)


class Seeded(Noisy):
    """Makes a generator for each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.generator = numpy.random.default_rng(index)
        return super().__getitem__(index)


class SeededByHand(Noisy):
    """Seeds its generator for each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.generator.manual_seed(index)
        return torch.randn(6, generator=self.generator)


class StateByHand(Noisy):
    """Sets the state for each sample, where numpy's new generators have it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.generator.bit_generator.state = numpy.random.PCG64(index).state
        return super().__getitem__(index)


class SeededByOwner(Dataset[torch.Tensor]):
    """Wraps a data set, whose generator it seeds for each sample."""

    def __init__(self, dataset: Noisy) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> torch.Tensor:
        self.dataset.generator.seed(index)
        return self.dataset[index]


class Reshuffled(Quiet):
    """Draws between epochs, in the training process, and shows the state of its generator."""

    def reshuffle(self) -> None:
        self.shift = self.generator.normal()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator}

    def __repr__(self) -> str:
        return f"{self.generator}"


class Built(Noisy):
    """Draws all in a method that __init__ calls."""

    def __init__(self, generator: Any) -> None:
        super().__init__(generator)
        self.build()

    def build(self) -> None:
        self.noise = [self.generator.normal() for _ in range(32)]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), self.noise[index])


class Borrowed(Noisy):
    """Draws from the generator of another object."""

    def __init__(self, generator: Any) -> None:
        super().__init__(generator)
        self.other = random

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), self.other.generator.normal())


class Shuffled(IterableDataset[int]):
    """Each worker draws the same order."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        order = list(range(32))
        self.generator.shuffle(order)
        yield from order


class Sharded(IterableDataset[torch.Tensor]):
    """Each worker takes its share of the same order."""

    def __init__(self) -> None:
        self.dataset = Shuffled()

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        for number, one in enumerate(self.dataset):
            if number % worker.num_workers == worker.id:
                yield torch.full((6,), float(one))


class Indirect(Noisy):
    """Draws in a property, by way of a method, in a function that is decorated."""

    @torch.no_grad()
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([self.draw() for _ in range(6)])

    def draw(self) -> torch.Tensor:
        return torch.tensor(self.number)

    @property
    def number(self) -> float:
        return float(self.generator.normal())


class Overridden(Indirect):
    def draw(self) -> torch.Tensor:
        return 2 * super().draw()


class Jitter:
    """A transform that draws from its generator."""

    def __init__(self) -> None:
        self.source = torch.Generator()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.source)


class JitterModule(nn.Module):
    """A transform that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.source)


class Steps:
    """Transforms, one after another; reading an attribute by its name would run code."""

    def __init__(self, *transforms: object) -> None:
        self.transforms = list(transforms)

    @property
    def dataset(self) -> object:
        raise AssertionError("called")

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("called")


class Images(Dataset[torch.Tensor]):
    def __init__(self, transform: object) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(6)


def own() -> Noisy:
    return Noisy(numpy.random.default_rng(1))


COPIED = {
    "numpy's": (own, "Noisy.generator"),
    "numpy's former": (lambda: Noisy(numpy.random.RandomState(1)), "Noisy.generator"),
    "python's": (lambda: Noisy(random.Random(1)), "Noisy.generator"),
    "torch's": (lambda: Noisy(torch.Generator()), "Noisy.generator"),
    "within others": (lambda: Subset(ConcatDataset([own(), own()]), [1, 2]), "Noisy.generator"),
    "deep within": (lambda: functools.reduce(lambda data, _: Subset(data, [0]), range(20), own()), "Noisy.generator"),
    "of a transform": (lambda: Images(Steps(Jitter())), "Jitter.source"),
    "of a transform that is a module": (lambda: Images(JitterModule()), "JitterModule.source"),
    "by way of methods": (lambda: Indirect(numpy.random.default_rng(1)), "Indirect.generator"),
    "by way of a base class": (lambda: Overridden(numpy.random.default_rng(1)), "Overridden.generator"),
}

NOT_COPIED = {
    "used in __init__ only": lambda: Quiet(numpy.random.default_rng(1)),
    "made for each sample": lambda: Seeded(numpy.random.default_rng(1)),
    "seeded for each sample": lambda: SeededByHand(torch.Generator()),
    "in a state that is set for each sample": lambda: StateByHand(numpy.random.default_rng(1)),
    "seeded by what wraps it": lambda: SeededByOwner(Noisy(numpy.random.RandomState(1))),
    "used between epochs": lambda: Reshuffled(numpy.random.default_rng(1)),
    "used in what __init__ calls": lambda: Built(numpy.random.default_rng(1)),
    "another object's, of that name": lambda: Borrowed(numpy.random.default_rng(1)),
    "a stream that is shared out": Sharded,
    "the global one of numpy": lambda: Noisy(numpy.random.rand.__self__),
    "the global one of python": lambda: Noisy(random.random.__self__),
    "the global one of torch": lambda: Noisy(torch.default_generator),
    "the system's, which has no state": lambda: Noisy(random.SystemRandom()),
    "no generator": lambda: Noisy(None),
}


@pytest.mark.parametrize("case", COPIED)
def test_a_generator_that_methods_draw_from(case: str) -> None:
    make, name = COPIED[case]
    assert list_copied_generators(DataLoader(make(), num_workers=2)) == [name]


@pytest.mark.parametrize("case", NOT_COPIED)
def test_a_generator_that_does_not_repeat(case: str) -> None:
    assert list_copied_generators(DataLoader(NOT_COPIED[case](), num_workers=2)) == []


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2, "worker_init_fn": print}])
def test_a_loader_without_copies_or_with_a_function_that_may_seed_them(options: dict[str, Any]) -> None:
    assert list_copied_generators(DataLoader(own(), **options)) == []
    assert list_copied_generators(iter(DataLoader(own()))) == []


class Computed(DataLoader[Any]):
    """A loader whose data set cannot be read."""

    loaded = False

    def __getattribute__(self, name: str) -> Any:
        if name == "dataset" and object.__getattribute__(self, "loaded"):
            raise RuntimeError("not loaded yet")
        return super().__getattribute__(name)


def test_a_loader_whose_data_set_cannot_be_read() -> None:
    loader = Computed(own(), num_workers=2)
    loader.loaded = True
    assert list_copied_generators(loader) == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_keep_their_identity_where_generators_cannot_be_looked_at(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    iterator = iter(DataLoader(own(), batch_size=8, num_workers=2))
    with sentinel.attach(net, optimizer):
        monkeypatch.setitem(sys.modules, "numpy.random", SimpleNamespace())  # a stub
        for batch in iterator:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    daemon.ended()
    assert len(daemon.series("batch_identity")) == 4
    assert not daemon.series("copied_generators")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of one core
@pytest.mark.parametrize("given", [True, False])
def test_copied_generators_are_reported_with_the_batches(daemon: FakeDaemon, given: bool) -> None:
    net, loader = model(), DataLoader(own(), batch_size=8, num_workers=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer, loader=loader if given else None) as monitor:
        batches = iter(loader if given else monitor.batches(loader))
        first, second = next(batches), next(batches)
        assert torch.equal(first, second), "the noise repeats"
        for batch in (first, second):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
    daemon.ended()
    assert set(daemon.series("copied_generators").values()) == {1.0}
    facts = daemon.of(wire.Hello)[-1].facts
    assert (facts["copied_generators"], facts["copying_workers"]) == (["Noisy.generator"], 2)


class Louder(Noisy):
    """The same under another name."""


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loaders_that_take_turns_are_reported_once_each() -> None:
    """Each report is a whole hello, with all layers."""
    batches, told = Batches(StepAccumulator()), list[tuple[list[str], int]]()
    batches.announce = lambda: told.append((batches.facts["copied_generators"], batches.facts["copying_workers"]))
    for _ in range(3):
        for workers, dataset in ((3, own()), (2, own()), (2, Louder(numpy.random.default_rng(1)))):
            batches.batch_fetched(DataLoader(dataset, num_workers=workers), 0.0, torch.ones(2, 3))
    assert told == [(["Noisy.generator"], 3), (["Noisy.generator", "Louder.generator"], 3)]
