"""Backward passes without a step of the watched optimizer: another one takes over, or the lack of steps is reported."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import sentinel
from sentinel import wire
from sentinel.hooks.session import backward_passes
from tests.hooks import loops
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import fit, sgd
from tests.hooks.sessions import find_session, list_sessions


def test_an_optimizer_that_takes_the_place_of_one_that_is_held_is_watched(daemon: FakeDaemon) -> None:
    """A scheduler holds the first optimizer: fine-tuning in two phases looks like this."""
    net = loops.model()
    first = sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 10)
    monitor = sentinel.attach(net, first, step=100)
    heard = threading.Event()
    monitor.on_alert(lambda alert: heard.set())
    fit(net, first, 5)
    run = find_session(monitor).who.name
    second = torch.optim.AdamW(net.parameters(), lr=1e-3)
    fit(net, second, backward_passes.LOOK_PASSES + 10)
    daemon.wait(lambda: daemon.of(wire.Goodbye) and len(daemon.of(wire.Hello)) > 1)
    assert [session.watches(second) for session in list_sessions() if not session.ended] == [True]
    hello = daemon.of(wire.Hello)[-1]
    assert (hello.streams, hello.identity.run) == (("AdamW",), run)
    assert hello.identity.run_id == daemon.of(wire.Hello)[0].identity.run_id
    assert hello.identity.session != daemon.of(wire.Hello)[0].identity.session
    assert hello.step_offset == 100 + 5 + backward_passes.LOOK_PASSES, "the steps that were missed count"
    daemon.send(wire.Notice(id="a", text="", alert={"alert": "NonFiniteLoss"}))
    assert heard.wait(WAIT)
    monitor.detach()
    assert list_sessions()[-1].ended, "the handle is on what is watched now"
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 2)
    assert len(daemon.series("loss")) >= 8
    assert scheduler.optimizer is first


def test_an_optimizer_with_an_attach_of_its_own_is_watched_once(daemon: FakeDaemon) -> None:
    net = loops.model()
    first = sgd(net)
    sentinel.attach(net, first)
    fit(net, first, 2)
    second = sgd(net)
    sentinel.attach(net, second)
    fit(net, second, backward_passes.LOOK_PASSES + 4)
    (alive,) = [session for session in list_sessions() if not session.ended]
    assert alive.watches(second)


def test_an_optimizer_that_takes_turns_with_another_stays_watched(daemon: FakeDaemon) -> None:
    """Passes accumulate, and another optimizer of the same parameters steps in between, but ours steps too."""
    net = loops.model()
    ours, other = sgd(net), sgd(net)
    monitor = sentinel.attach(net, ours)
    for _ in range(3):
        for batch in loops.batches(backward_passes.LOOK_PASSES + 2):
            loops.loss_of(net, batch).backward()
        ours.step()
        fit(net, other, 3)
        fit(net, ours, 1)
    assert monitor.state != "detached"
    monitor.detach()
    assert len(daemon.of(wire.Hello)) == 1
    assert not _global_optimizer_pre_hooks


def test_training_without_steps_is_reported_once_and_taken_back_at_the_first(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer)
    for batch in loops.batches(2 * backward_passes.TELL_PASSES):
        net.zero_grad()
        loops.loss_of(net, batch).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
    text = f"optimizer steps ({backward_passes.TELL_PASSES} backward passes, and no step of SGD)"
    daemon.wait(lambda: any(text in hello.unseen for hello in daemon.of(wire.Hello)))
    said = capsys.readouterr().err
    assert said.count("and no step of SGD: nothing is watched without steps") == 1
    fit(net, optimizer, 2)
    daemon.wait(lambda: text not in daemon.of(wire.Hello)[-1].unseen)
    monitor.detach()
