"""Second moments that are out of line, and the exponents of gradients, collected when the daemon asks."""

from __future__ import annotations

import msgspec
import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.hooks.evidence.collector import moments
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.wire.evidence import Moments
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, model


def test_a_layer_with_one_huge_gradient_behind_it_is_first() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(30):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 2.0**-5)
        if step == 20:
            net[3].weight.grad.fill_(1e3)
        optimizer.step()
    found = moments(optimizer, Layers(0, [net], optimizer), 30)
    assert found.layers[0].layer == "3.weight"
    assert found.layers[0].ratio > 100
    assert found.usual == pytest.approx(1.0, rel=1e-3)
    assert found.layers[-1].gradient == pytest.approx(2.0**-5)
    assert (found.exponents["-8"], found.exponents["-4"], found.zero_share) == (0.0, 1.0, 0.0)


def test_layers_without_a_gradient_or_a_moment_do_not_count_as_usual() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(30):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 2.0**-5)
        optimizer.step()
    for parameter in list(net.parameters())[:4]:  # of six
        optimizer.state[parameter]["exp_avg_sq"].zero_()
    net[3].weight.grad.zero_()
    assert moments(optimizer, Layers(0, [net], optimizer), 30).usual == pytest.approx(1.0, rel=1e-3)


def test_optimizers_without_second_moments_say_so() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = moments(optimizer, Layers(0, [net], optimizer), 0)
    assert found.missing == ("second moments: SGD keeps none by element",)
    assert found.zero_share == 1.0


def test_moments_are_sent_when_asked_and_change_nothing(daemon: FakeDaemon) -> None:
    bare, watched = model(), model()
    Loop(bare, torch.optim.AdamW(bare.parameters())).run(12)
    optimizer = torch.optim.AdamW(watched.parameters())
    monitor = sentinel.attach(watched, optimizer)
    loop = Loop(watched, optimizer)
    loop.run(1)
    daemon.wait(lambda: daemon.seqs())
    daemon.send(wire.Ask(id=9, what="moments"))
    daemon.wait(lambda: any(reply.id == 9 and reply.ok for reply in daemon.of(wire.Reply)))
    loop.run(11)
    monitor.detach()
    daemon.ended()
    (sent,) = [one for one in daemon.of(wire.Collected) if one.what == "moments"]
    found = msgspec.convert(sent.content, Moments)
    assert found.seq == sent.seq == 1
    assert len(found.layers) == len(list(watched.parameters()))
