"""Batches that a DataLoader gives to a fast loop, noted in C: the same as in Python, whatever happens between."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel.hooks import contents, fast_path_native
from sentinel.hooks.contents import Contents
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import loss_of, model

pytestmark = [
    pytest.mark.skipif(fast_path_native.missing(), reason="the compiled part was not built"),
    pytest.mark.usefixtures("fast"),
]


class Fed:
    """A loop that is fed by a DataLoader, and in which all kinds of things happen before a batch is fetched."""

    def __init__(self, monitor: sentinel.Monitor, net: nn.Module, loader: DataLoader[Any]) -> None:
        self._monitor, self._net, self._loader = monitor, net, loader
        self._batches: Iterator[Any] = iter(loader)
        self._other = DataLoader(TensorDataset(torch.randn(80, 6)), 8)
        self._others = iter(self._other)
        self.told: list[str] = []
        assert monitor._session is not None
        self._session = monitor._session
        self.states: list[dict[str, Any]] = []

    def step(self, what: str, optimizer: torch.optim.Optimizer) -> None:
        getattr(self, f"_{what}", lambda: None)()
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self.states.append(self._state(batch[0]))
        optimizer.zero_grad()
        loss_of(self._net, batch[0]).backward()
        optimizer.step()

    def _state(self, batch: torch.Tensor) -> dict[str, Any]:
        ledger, batches = self._session.ledger, self._session.batches
        feeds, looked = ledger.feeds, batches._contents
        assert looked is not None
        found: dict[str, Any] = {"sum": float(batch.sum()), "looked": looked._count, "to skip": batches._to_skip}
        found |= {name: getattr(ledger.tally, name) for name in ("batch", "batches", "forwards")}
        found |= {name: getattr(feeds, name) for name in ("batches", "exhausted", "length")}
        found |= {"told": len(self.told), "waited": ledger.tally.data_seconds > 0.0}
        return found | {"progress": ledger.progress, "work": ledger.work}

    def _another(self) -> None:
        next(self._others)

    def _broken_off(self) -> None:
        self._batches = iter(self._loader)

    def _evaluation(self) -> None:
        with torch.no_grad():
            for (batch,) in self._other:
                self._net(batch)

    def _skipped(self) -> None:
        self._session.batches.skip(2)

    def _deferred(self) -> None:
        self._session.ledger.defer(self._deferred_told)

    def _deferred_told(self) -> None:
        self.told.append("deferred")

    def _beside(self) -> None:
        thread = threading.Thread(target=next, args=(self._batches,))
        thread.start()
        thread.join()

    def _watched(self) -> None:
        next(iter(self._monitor.batches(self._other)))

    def _watched_midway(self) -> None:
        next(iter(self._monitor.batches(self._batches)), None)

    def _due(self) -> None:
        """To be looked at again."""
        assert self._session.batches._contents is not None
        self._session.batches._contents._again_at = 0.0

    def _ahead(self) -> None:
        """As Accelerate fetches, from now on."""
        module: dict[str, Any] = {"__name__": "accelerate.data_loader"}
        exec("def fetched(batches): return next(batches)", module)
        self._batches = iter(self._loader)
        module["fetched"](self._batches)

    def _failed(self) -> None:
        """As where a batch could not be looked at."""
        self._session.batches._contents = Contents()


FETCHES = (
    "another", "beside", "broken_off", "deferred", "due", "evaluation", "failed", "skipped", "watched",
    "watched_midway",
)  # fmt: skip


def fed(program: list[str], daemon: FakeDaemon, workers: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """States after each fetch, and what was told."""
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(240, 6))
    net, loader = model(), DataLoader(rows, 8, num_workers=workers, persistent_workers=workers > 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with sentinel.attach(net, optimizer, loader=loader) as monitor:
        loop = Fed(monitor, net, loader)
        for what in program:
            loop.step(what, optimizer)
    daemon.ended()
    daemon.messages.clear()
    return loop.states, loop.told


@pytest.mark.parametrize("seed", range(6))
def test_batches_are_the_same_as_in_python(
    seed: int, daemon: FakeDaemon, left: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "SPACING_SECONDS", 1e9)
    chance = random.Random(seed)
    program = ["ahead" if seed == 1 else "plain"] + ["plain"] * 20
    program += [chance.choice(FETCHES) if chance.random() < 0.2 else "plain" for _ in range(80)]
    compiled = fed(program, daemon, workers=int(seed == 0))
    assert seed == 1 or left["fetch ends"] < 100
    fast_path_native.use(False)
    assert fed(program, daemon, workers=int(seed == 0)) == compiled


def test_a_batch_that_is_not_looked_at_is_left_to_nobody(
    daemon: FakeDaemon, left: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "SPACING_SECONDS", 1e9)
    fed(["plain"] * 60, daemon)
    assert left["fetch begins"] == 0
    assert left["fetch ends"] == contents.BURST + 1, "and the first of another epoch"
