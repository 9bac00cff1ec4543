"""Whether a run is in fp16, and whether its loss is scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import sentinel
from sentinel.hooks.loop.losses import EngineLossScale
from sentinel.hooks.measure.probes import gradients
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def test_fp16_autocast_without_a_scaler(daemon: FakeDaemon) -> None:
    net = model()
    with sentinel.attach(net, loop := Loop(net, sgd(net), half=True).optimizer):
        Loop(net, loop, half=True).run(5)
    daemon.ended()
    assert daemon.series("fp16") == dict.fromkeys(range(5), 1.0)
    assert daemon.series("loss_scale") == {}


@pytest.mark.parametrize("enabled", [True, False])
def test_fp16_autocast_with_a_scaler_that_may_be_off(enabled: bool, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        Loop(net, optimizer, GradScaler("cpu", init_scale=8.0, enabled=enabled), half=True).run(3)
    daemon.ended()
    assert daemon.series("fp16") == dict.fromkeys(range(3), 1.0)
    assert daemon.series("loss_scale") == (dict.fromkeys(range(3), 8.0) if enabled else {})
    assert bool(daemon.series("grad_zero_share")) is not enabled


@pytest.mark.parametrize("autocast", [{"enabled": False}, {"dtype": torch.bfloat16}])
def test_what_is_not_fp16(autocast: dict[str, Any], daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for batch in batches(3):
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                net(batch)  # an evaluation may be in fp16
            with torch.autocast("cpu", **autocast):
                loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert daemon.series("fp16") == {}


def test_fp16_parameters(daemon: FakeDaemon) -> None:
    net = nn.Linear(6, 1).half()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for batch in batches(2):
            net(batch.half()).float().square().mean().backward()
            optimizer.step()
    daemon.ended()
    assert daemon.series("fp16") == {0: 1.0, 1: 1.0}


def test_what_fp16_gradients_lose(daemon: FakeDaemon) -> None:
    net = nn.Linear(100, 100, bias=False)
    optimizer = sgd(net)
    values = torch.full((100, 100), 1e-3)
    values[:25], values[25:40] = 0.0, -1e-5
    with sentinel.attach(net, optimizer):
        with torch.autocast("cpu", torch.float16):
            (net(torch.ones(1, 100)) * 0.0).sum().backward()
        net.weight.grad = values
        optimizer.step()
    daemon.ended()
    assert daemon.series("grad_zero_share") == pytest.approx({0: 0.25})
    assert daemon.series("grad_tiny_share") == pytest.approx({0: 0.15})


def test_a_sample_of_large_gradients_is_spread_over_them(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUDGET", 50)
    net = nn.Linear(100, 1, bias=False)
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        with torch.autocast("cpu", torch.float16):
            net(torch.ones(1, 100)).sum().backward()
        net.weight.grad = torch.cat([torch.zeros(50), torch.ones(50)]).view(1, 100)
        optimizer.step()
    daemon.ended()
    assert daemon.series("grad_zero_share") == {0: 0.5}


class Engine:
    """An optimizer that scales by itself, as DeepSpeed's do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.cur_scale = 512


def test_an_optimizer_with_a_scale_of_its_own(daemon: FakeDaemon) -> None:
    net = model()
    engine = Engine(sgd(net))
    with sentinel.attach(net, engine):
        Loop(net, engine.optimizer, half=True).run(2)
        engine.cur_scale = 256
        Loop(net, engine.optimizer, half=True).run(1)
    daemon.ended()
    assert daemon.series("loss_scale") == {0: 512.0, 1: 512.0, 2: 256.0}


def test_a_value_that_is_no_scale_is_not_taken_for_one() -> None:
    class Odd:
        loss_scale = "dynamic"
        cur_scale = True

    assert EngineLossScale(Odd())() is None
    engine = Engine(sgd(model()))
    scale = EngineLossScale(engine)
    engine.cur_scale = torch.tensor(64.0)  # type: ignore[assignment]
    assert scale() == 64.0
    del engine
    assert scale() is None


@pytest.mark.parametrize("unscale", [True, False])
def test_clipping_what_is_still_scaled(unscale: bool, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        Loop(net, optimizer, GradScaler("cpu", init_scale=8.0), half=True, unscale=unscale, clip=1.0).run(4)
    daemon.ended()
    seen = daemon.series("clipped_scaled")
    assert seen == ({} if unscale else dict.fromkeys(seen, 1.0))
    assert unscale or {1, 2, 3} <= seen.keys()
