"""Probes of other packages."""

from __future__ import annotations

import importlib.metadata
from typing import Any, ClassVar

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.hooks import Probe, Step
from sentinel.hooks.measure import probe
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, model


class Sparsity(Probe):
    tier = 2
    signals: ClassVar[Any] = {"grad_zero_share": "rank", "layer_zero_share": "layer"}

    def before(self, step: Step) -> None:
        assert step.gradients is not None
        zeros = torch.stack([(g == 0).float().mean() for g in step.gradients.tensors])
        step.layers["layer_zero_share"] = zeros
        step.values["grad_zero_share"] = zeros.mean()


class Weights(Probe):
    """Reports whether a sum of weights would keep autograd's graph."""

    signals: ClassVar[Any] = {"recorded_before": "rank", "recorded_after": "rank"}

    def before(self, step: Step) -> None:
        step.values["recorded_before"] = self.look(step)

    def after(self, step: Step) -> None:
        step.values["recorded_after"] = self.look(step)

    def look(self, step: Step) -> float:
        return float(step.optimizer.param_groups[0]["params"][0].sum().requires_grad)


class Applied(Probe):
    """Compares the gradients before and after the step, which the optimizer does not change."""

    tier = 2
    signals: ClassVar[Any] = {"gradients_kept": "rank"}

    def before(self, step: Step) -> None:
        assert step.gradients is not None
        self.seen = [gradient.clone() for gradient in step.gradients.tensors]

    def after(self, step: Step) -> None:
        assert step.gradients is not None
        pairs = zip(self.seen, step.gradients.tensors, strict=True)
        step.values["gradients_kept"] = float(all(torch.equal(before, after) for before, after in pairs))


def offer(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    points = [importlib.metadata.EntryPoint(name, f"{__name__}:{name}", probe.ENTRY_POINTS) for name in names]
    real = importlib.metadata.entry_points

    def entry_points(**selected: str) -> Any:  # triton looks for its own, where it is loaded meanwhile
        return points if selected == {"group": probe.ENTRY_POINTS} else real(**selected)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_a_probe_of_another_package(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "Sparsity")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        Loop(net, optimizer).run(9)
    daemon.ended()
    assert daemon.of(wire.Hello)[0].signals == {"grad_zero_share": "rank", "layer_zero_share": "layer"}
    assert daemon.series("grad_zero_share") == {0: 0.0, 8: 0.0}
    assert daemon.layers("layer_zero_share")[8] == {name: 0.0 for name, _ in net.named_parameters()}


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_what_a_probe_computes_of_weights_is_not_recorded_by_autograd(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tier: int
) -> None:
    monkeypatch.setattr(Weights, "tier", tier)
    offer(monkeypatch, "Weights")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        Loop(net, optimizer).run(1)
    daemon.ended()
    assert daemon.series("recorded_before") == daemon.series("recorded_after") == {0: 0.0}


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_can_be_read_when_the_optimizer_is_done(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    offer(monkeypatch, "Applied")
    net = model()
    net[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        Loop(net, optimizer).run(1)
    daemon.ended()
    assert daemon.series("gradients_kept") == {0: 1.0}


@pytest.mark.faults
def test_a_probe_that_cannot_be_loaded(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, swallowed: list[str]
) -> None:
    offer(monkeypatch, "Missing", "Sparsity")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer):
        Loop(net, optimizer).run(1)
    daemon.ended()
    assert 0 in daemon.series("grad_zero_share")
    assert len(swallowed) == 1
    assert "Missing" in swallowed[0]
