"""Frozen batch norms that go on averaging are counted, and named by their weight's row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sentinel
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop


def streamed(daemon: FakeDaemon, body: nn.Module) -> tuple[dict[int, float], dict[int, float]]:
    """Train one step, at which tier 3 is sampled; return (step -> count, step -> row)."""
    net = nn.Sequential(nn.Linear(6, 8), body, nn.Linear(8, 1))
    loop = Loop(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01))
    with sentinel.attach(net, loop.optimizer, overhead=1.0):
        loop.run(1)
    daemon.ended()
    return daemon.series("frozen_statistics"), daemon.series("frozen_statistics_row")


def test_a_frozen_batch_norm_in_training_mode(daemon: FakeDaemon) -> None:
    counts, rows = streamed(daemon, nn.BatchNorm1d(8).requires_grad_(False))
    assert counts == {0: 1.0}
    assert rows == {0: 2.0}, "behind the weight and the bias of the first layer"


def test_a_frozen_batch_norm_in_evaluation_mode_does_not_count(daemon: FakeDaemon) -> None:
    counts, rows = streamed(daemon, nn.BatchNorm1d(8).requires_grad_(False).eval())
    assert counts == {0: 0.0}
    assert rows == {}


@pytest.mark.parametrize(
    "body", [nn.BatchNorm1d(8), nn.LayerNorm(8).requires_grad_(False), nn.BatchNorm1d(8, affine=False)]
)
def test_norms_that_train_or_keep_no_statistics_do_not_count(daemon: FakeDaemon, body: nn.Module) -> None:
    assert streamed(daemon, body) == ({}, {})


def test_a_batch_norm_without_weights_is_frozen_with_the_layers_around_it(daemon: FakeDaemon) -> None:
    trunk = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8, affine=False))).requires_grad_(False)
    assert streamed(daemon, trunk) == ({0: 1.0}, {0: -1.0})
