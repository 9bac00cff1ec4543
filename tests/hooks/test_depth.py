"""Signals of a network as a whole: gradients by depth, Post-LN, the time of the gradients' reduction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import sentinel
from sentinel.hooks.core import governor
from sentinel.hooks.measure import kernels
from sentinel.hooks.measure.probes.topology import post_norms
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "FIRST", {0: 1, 1: 1, 2: 1, 3: 1})


def deep(activation: Callable[[], nn.Module], layers: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(16, 16), activation())]
    return nn.Sequential(nn.Linear(6, 16), *hidden, nn.Linear(16, 1))


def ratio(net: nn.Module) -> float:
    sizes = [float(p.grad.norm()) / math.sqrt(p.numel()) for p in net.parameters() if p.dim() > 1][1:-1]  # type: ignore[union-attr]
    quarter = len(sizes) // 4
    first, last = (sorted(s for s in part if s > 0) for part in (sizes[:quarter], sizes[-quarter:]))
    return last[(len(last) - 1) // 2] / (first[(len(first) - 1) // 2] if first else 1e-30)


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_gradients_are_compared_over_depth(compiled: bool, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "kernel_missing", "not wanted")
    net = deep(nn.Sigmoid, layers=25)  # quarters of these change with each layer that is left out
    found: list[float] = []
    loop = Loop(net, torch.optim.SGD(net.parameters(), lr=0.01))
    with sentinel.attach(net, loop.optimizer):
        loop.run(3, lambda _: found.append(ratio(net)))
    daemon.ended()
    assert list(daemon.series("gradient_depth_ratio").values()) == pytest.approx(found, rel=1e-4)
    assert found[0] > 1e6


def test_layers_without_a_gradient_say_nothing_of_depth(daemon: FakeDaemon) -> None:
    net = deep(nn.Tanh, layers=16)
    found: list[float] = []

    def silence(step: int) -> None:
        for index in (1, 3) if step else (1, 3, 5, 7):  # of the four in the first quarter
            net[index].weight.grad.zero_()  # type: ignore[union-attr, operator]
        found.append(ratio(net))

    loop = Loop(net, torch.optim.SGD(net.parameters(), lr=0.0))
    with sentinel.attach(net, loop.optimizer):
        loop.run(2, silence)
    daemon.ended()
    assert list(daemon.series("gradient_depth_ratio").values()) == pytest.approx(found, rel=1e-4)
    assert found[0] > 1e20 > 1e6 > found[1]


def test_last_layers_without_a_gradient_are_no_explosion(daemon: FakeDaemon) -> None:
    net = deep(nn.Tanh, layers=16)

    def silence(_: int) -> None:
        for layer in [part for part in net if isinstance(part, nn.Linear)][-6:-1]:
            layer.weight.grad.zero_()  # type: ignore[union-attr]

    loop = Loop(net, torch.optim.SGD(net.parameters(), lr=0.0))
    with sentinel.attach(net, loop.optimizer):
        loop.run(2, silence)
    daemon.ended()
    assert list(daemon.series("gradient_depth_ratio").values()) == [1.0, 1.0]


def test_a_small_network_has_no_depth(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, torch.optim.SGD(net.parameters(), lr=0.01))
    with sentinel.attach(net, loop.optimizer):
        loop.run(2)
    daemon.ended()
    assert daemon.series("gradient_depth_ratio") == {}
    assert daemon.series("post_norm_layers") == {}
    assert daemon.series("communication_seconds") == {}


def encoder(*, norm_first: bool, layers: int = 3) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Residual(nn.Module):
    """A residual network as people write it by hand."""

    def __init__(self, *, after: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(5))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[4](x)  # of an embedding, as GPTs have it too
        for block, norm in zip(self.blocks, self.norms, strict=False):
            x = norm(x + functional.gelu(block(x))) if self.after else x + functional.gelu(block(norm(x)))
        return x


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (encoder(norm_first=False), 5),  # of six: the first block adds to what is not normalised
        (encoder(norm_first=True), 0),
        (Residual(after=True), 4),
        (Residual(after=False), 1),
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)), 0),
    ],
    ids=["encoder-post", "encoder-pre", "own-post", "own-pre", "plain"],
)
def test_post_norm_is_seen_in_the_graph(net: nn.Module, expected: int) -> None:
    x = torch.randn(2, 4, 8)
    assert post_norms(net(x).square().mean().grad_fn) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert post_norms(net(x).square().mean().grad_fn) == expected


def test_post_norm_is_reported_at_the_first_steps(daemon: FakeDaemon) -> None:
    net = nn.Sequential(nn.Linear(6, 8), encoder(norm_first=False), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        for batch in batches(2):
            optimizer.zero_grad()
            net(batch[None]).square().mean().backward()
            optimizer.step()
    daemon.ended()
    assert daemon.series("post_norm_layers") == {0: 5.0, 1: 5.0}


def test_the_reduction_of_ddp_is_timed_by_itself(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(model())
        logged: list[dict[str, Any]] = []
        read = net._get_ddp_logging_data

        def kept() -> dict[str, Any]:
            logged.append(read())
            return logged[-1]

        monkeypatch.setattr(net, "_get_ddp_logging_data", kept)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        with sentinel.attach(net, optimizer):
            for batch in batches(14):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
    finally:
        torch.distributed.destroy_process_group()
    daemon.ended()
    timed = {
        seq: max(one["backward_comm_time"] - one["backward_compute_comm_overlap_time"], 0) / 1e9
        for seq, one in enumerate(logged)
        if one.get("backward_comm_time") and one["iteration"] > (logged[seq - 1]["iteration"] if seq else 0)
    }
    assert len(timed) >= 8
    assert daemon.series("communication_seconds") == pytest.approx(timed)
