"""Steps of which only the loss is taken, in loops so fast that more would be felt."""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import wire
from sentinel.hooks import Probe, Step, pacing, probe
from sentinel.hooks.tally import Work
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model

WHOLE = [0, 1, 2, 3, 4, 8, 12, 16, 20]
"""Of 24 steps."""


@pytest.fixture(autouse=True)
def every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "FIRST", {0: 4, 1: 8, 2: 8, 3: 256})
    monkeypatch.setattr(pacing, "WHOLE", 4)
    monkeypatch.setattr(probe, "EARLY", 4)


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def test_loss_and_norm_of_every_step_and_the_rest_of_every_fourth(daemon: FakeDaemon) -> None:
    bare = Loop(net := model(), adamw(net), clip=0.5, accumulate=2)
    losses = bare.run(24)
    watched = Loop(net := model(), adamw(net), clip=0.5, accumulate=2)
    with sentinel.attach(watched.net, watched.optimizer):
        assert watched.run(24) == losses
    daemon.ended()
    assert daemon.seqs() == list(range(24))
    assert daemon.series("loss") == dict(enumerate(losses))
    assert list(daemon.series("grad_norm")) == list(daemon.series("clip_limit")) == list(range(24))
    assert list(daemon.series("learning_rate")) == WHOLE
    assert daemon.series("micro_batches") == dict.fromkeys(WHOLE, 2.0)
    for one, other in zip(bare.net.parameters(), watched.net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_times_are_means_of_the_steps_between(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        assert monitor._watch is not None
        ledger = monitor._watch.ledger

        def wait(step: int) -> None:
            if step == 6:
                ledger.waited(iter(DataLoader(range(1))), 4.0, None)

        loop.run(13, wait)
    daemon.ended()
    assert daemon.series("data_seconds")[8] == pytest.approx(1.0)
    assert 12 not in daemon.series("data_seconds")
    assert ledger.work == Work.STEP
    assert ledger.steps == 13
    whole = daemon.series("step_seconds")
    parts = ("forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")
    assert sum(daemon.series(part)[12] for part in parts) == pytest.approx(whole[12])


def test_a_loss_that_is_not_finite_is_seen_whole_at_once(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        for seq, batch in enumerate(batches(8)):
            if seq == 6:
                batch[0, 0] = math.nan
            loop.optimizer.zero_grad()
            loss_of(net, batch).backward()
            loop.optimizer.step()
    daemon.ended()
    assert math.isnan(daemon.series("loss")[6])
    assert list(daemon.series("learning_rate")) == [0, 1, 2, 3, 4, 6, 7]
    assert 6 in daemon.layers("layer_nonfinite")
    (found,) = [message for message in daemon.of(wire.Collected) if message.what == "provenance"]
    assert found.seq == 6
    assert found.content["origin"] == "data"


def test_after_a_norm_that_is_not_finite_steps_are_seen_whole(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net), clip=0.5, overflow=frozenset({6}))
    attentive = []
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        assert monitor._watch is not None
        pace = monitor._watch.pacing
        loop.run(8, lambda step: attentive.append(not pace.glances(7)))
    daemon.ended()
    assert not math.isfinite(daemon.series("grad_norm")[6])
    assert list(daemon.series("learning_rate")) == [0, 1, 2, 3, 4, 7]
    assert attentive == [False] * 7 + [True], "before the loss of the next step tells"


def test_nothing_that_happened_between_is_lost(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    data = iter(DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=8))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        for seq in range(12):
            (batch,) = next(data)
            net.train(seq != 6)
            if seq == 7:
                monitor.log(reward=3.0)
            loop.optimizer.zero_grad()
            loss_of(net, batch).backward()
            loop.optimizer.step()
    daemon.ended()
    assert daemon.series("eval_mode") == {8: 1.0}
    assert daemon.series("reward") == {7: 3.0}
    assert list(daemon.series("batch_identity")) == list(range(12)), "the first batches are all looked at"


def test_where_a_scaler_may_withhold_a_step_all_are_whole(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net), GradScaler("cpu", init_scale=1024.0), overflow=frozenset({6}))
    with sentinel.attach(loop.net, loop.optimizer):
        loop.run(8)
    daemon.ended()
    assert daemon.series("step_skipped") == {seq: float(seq == 6) for seq in range(8)}
    assert list(daemon.series("loss_scale")) == list(range(8))


class Counter(Probe):
    tier = 0

    def after(self, step: Step) -> None:
        step.values["counted"] = float(step.seq)


def test_a_probe_of_another_package_is_called_at_every_step(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: Any = [importlib.metadata.EntryPoint("Counter", f"{__name__}:Counter", probe.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        loop.run(8)
    daemon.ended()
    assert daemon.series("counted") == {seq: float(seq) for seq in range(8)}


def test_of_two_optimizers_each_takes_its_part_at_once(daemon: FakeDaemon) -> None:
    first, second = model(), model(1)
    optimizers = [adamw(first), adamw(second)]
    with sentinel.attach([first, second], optimizers):
        for batch in batches(8):
            for net, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
    daemon.ended()
    for stream in (0, 1):
        assert list(daemon.series("micro_batches", stream)) == list(range(8))


def test_gradients_that_are_never_cleared_are_found_later_too(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        for seq, batch in enumerate(batches(2 * probe.OCCASION + 1)):
            if seq < probe.OCCASION + 8:
                loop.optimizer.zero_grad()
            loss_of(net, batch).backward()
            loop.optimizer.step()
    daemon.ended()
    kept = daemon.series("gradients_kept")
    assert list(kept) == [*range(1, probe.EARLY), probe.OCCASION, 2 * probe.OCCASION]
    assert [seq for seq, value in kept.items() if value] == [2 * probe.OCCASION]
