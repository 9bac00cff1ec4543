"""A run with Sentinel has the same weights, to the bit, as one without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import sentinel
from sentinel.hooks.core import governor
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, model

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def fused(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def scaled(make: Make, **options: Any) -> Callable[[nn.Module], Loop]:
    return lambda net: Loop(net, make(net), GradScaler("cpu", 1024.0, growth_interval=5), half=True, **options)


LOOPS: dict[str, Callable[[nn.Module], Loop]] = {
    "adamw": lambda net: Loop(net, adamw(net)),
    "sgd-nesterov": lambda net: Loop(net, sgd(net)),
    "fused": lambda net: Loop(net, fused(net)),
    "clipped": lambda net: Loop(net, adamw(net), clip=0.5),
    "accumulated": lambda net: Loop(net, adamw(net), accumulate=3, clip=0.5),
    "scaler": scaled(adamw),
    "scaler-skips": scaled(adamw, overflow=frozenset({0, 3, 4, 11})),
    "scaler-unscale-clip": scaled(adamw, unscale=True, clip=0.5, overflow=frozenset({2})),
    "scaler-accumulated": scaled(sgd, accumulate=2, unscale=True, clip=0.5),
    "fused-scaler": scaled(fused),
    "fused-scaler-skips": scaled(fused, overflow=frozenset({1, 2, 9})),
    "fused-scaler-unscale-clip": scaled(fused, unscale=True, clip=0.5, overflow=frozenset({5})),
}


def state(loop: Loop) -> list[torch.Tensor]:
    """Return everything that training changes."""
    optimizer_state = [t for s in loop.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    scaler = [torch.tensor(loop.scaler.get_scale())] if loop.scaler is not None else []
    grads = [p.grad for p in loop.net.parameters() if p.grad is not None]
    return [*loop.net.state_dict().values(), *optimizer_state, *scaler, *grads, torch.get_rng_state()]


@pytest.fixture(autouse=True)
def rare_statistics_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "FIRST", {0: 1, 1: 1, 2: 8, 3: 1})


@pytest.mark.parametrize("name", LOOPS)
def test_weights_are_the_same_to_the_bit(name: str, daemon: FakeDaemon) -> None:
    bare = LOOPS[name](model())
    losses = bare.run(24)
    watched = LOOPS[name](model())
    with sentinel.attach(watched.net, watched.optimizer):
        assert watched.run(24) == losses
    daemon.ended()
    assert daemon.seqs() == list(range(24))
    for one, other in zip(state(bare), state(watched), strict=True):
        assert torch.equal(one, other)


def test_dropout_draws_the_same(daemon: FakeDaemon) -> None:
    def build() -> Loop:
        net = nn.Sequential(model(), nn.Dropout(0.3))
        return Loop(net, adamw(net))

    bare = build()
    bare.run(12)
    watched = build()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(12)
    assert all(torch.equal(one, other) for one, other in zip(state(bare), state(watched), strict=True))
