"""Attaching without code: what is found at the first step, and which attachment gives way."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sentinel
from sentinel import wire
from sentinel.hooks import auto_attach
from sentinel.hooks.session import registry
from sentinel.hooks.torch_interop import discovery
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model
from tests.hooks.sessions import list_sessions


@pytest.fixture(autouse=True)
def armed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attach at the first step, as in a process of `sentinel run`; pass over optimizers that other tests left."""
    monkeypatch.setenv("SENTINEL_RUN_ID", "job")
    monkeypatch.setattr(registry, "_made", 0)
    auto_attach._seen.update(discovery.trainers()[0])
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: auto_attach.attach_at_step(optimizer))
    yield
    handle.remove()


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def test_the_outermost_module_is_the_model(daemon: FakeDaemon) -> None:
    net = nn.ModuleDict({"inner": nn.Sequential(model())})
    loop = Loop(net["inner"], sgd(*net.parameters()))
    losses = loop.run(4)
    daemon.wait(lambda: 3 in daemon.seqs())
    (hello,) = daemon.of(wire.Hello)
    assert (hello.identity.run_id, hello.facts["model"]) == ("job", "ModuleDict")
    assert daemon.of(wire.LayerTable)[0].layers[0].name == "inner.0.0.weight"
    # What was computed before the first step is over by then.
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses[1:], 1)))
    assert daemon.series("grad_norm")[0] > 0


def test_optimizers_that_are_there_are_one_run_and_a_later_one_is_its_own(daemon: FakeDaemon) -> None:
    one, other, third = model(1), model(2), model(3)
    first, second = sgd(*other.parameters()), sgd(*one.parameters())
    for batch in batches(2):
        for net, optimizer in ((one, second), (other, first)):
            loss_of(net, batch).backward()
            optimizer.step()
    late = sgd(*third.parameters())
    late.step()
    daemon.wait(lambda: len(daemon.of(wire.Hello)) == 2 and 1 in daemon.seqs(stream=1))
    assert [(hello.identity.run_id, len(hello.streams)) for hello in daemon.of(wire.Hello)] == [
        ("job", 2),
        ("job-2", 1),
    ]
    assert daemon.seqs(stream=1)[:2] == [0, 1]


def backward_with_an_attach_before_it(loss: torch.Tensor) -> None:
    auto_attach.attach_at_backward()
    loss.backward()


def test_at_the_first_backward_pass_no_loss_is_missed(daemon: FakeDaemon) -> None:
    net = model()
    optimizer, losses = sgd(*net.parameters()), []
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        losses.append(loss.item())
        backward_with_an_attach_before_it(loss)
        optimizer.step()
    daemon.wait(lambda: 2 in daemon.seqs())
    assert len(daemon.of(wire.Hello)) == 1
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))
    assert daemon.series("grad_norm")[0] > 0


def test_a_trial_pass_before_training_is_no_part_of_the_first_step(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(*net.parameters())
    backward_with_an_attach_before_it(loss_of(net, next(batches(1))))
    losses = []
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    daemon.wait(lambda: 2 in daemon.seqs())
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))


def test_a_loss_that_was_scaled_before_the_attach_is_seen_unscaled(daemon: FakeDaemon) -> None:
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, losses = sgd(*net.parameters()), []
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(net, batch)
        losses.append(loss.item())
        backward_with_an_attach_before_it(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
    daemon.wait(lambda: 2 in daemon.seqs())
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))
    assert daemon.series("loss_scale") == dict.fromkeys(range(3), 1024.0)


def test_of_several_optimizers_the_step_says_which_one_leads(daemon: FakeDaemon) -> None:
    nets = model(1), model(2)
    first, second = (sgd(*net.parameters()) for net in nets)
    backward_with_an_attach_before_it(loss_of(nets[1], next(batches(1))))
    assert registry.find_session([first, second]) is None
    second.step()
    session = registry.find_session([first, second])
    assert session is not None
    assert session.monitors[0].optimizer() is second


def test_an_attach_of_the_script_takes_over(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    loop = Loop(net, sgd(*net.parameters()))
    loop.run(2)
    with sentinel.attach(net, loop.optimizer, run="mine"):
        loop.run(2)
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 2)
    assert "the script's own attach takes over" in capsys.readouterr().err
    identities = [hello.identity for hello in daemon.of(wire.Hello)]
    assert [(one.run_id, one.run == "mine") for one in identities] == [("job", False), ("job", True)]
    assert len({one.session for one in identities}) == 2


def test_an_attach_before_the_first_step_is_left_alone(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, sgd(*net.parameters()))
    with sentinel.attach(net, loop.optimizer, run="mine"):
        loop.run(2)
    daemon.ended()
    loop.run(1)  # after detach nothing is to be watched
    assert [hello.identity.run for hello in daemon.of(wire.Hello)] == ["mine"]
    assert registry.find_session([loop.optimizer]) is None


def test_parameters_that_are_in_no_module(capsys: pytest.CaptureFixture[str]) -> None:
    loose = nn.Parameter(torch.ones(2))
    optimizer = sgd(loose)
    optimizer.step()
    optimizer.step()
    assert capsys.readouterr().err.count("the parameters of SGD are in no torch.nn.Module that can be found") == 1


def test_a_model_that_was_replaced_after_the_optimizer_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # models of other tests
    net = model()
    optimizer, net = sgd(*net.parameters()), copy.deepcopy(net)
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "unmonitored" in line)
    assert f"none of the {len(list(net.parameters()))} parameters of SGD " in line
    assert f"is one of {type(net).__name__}'s ({next(net.named_parameters())[0]}, " in line
    assert "make the optimizer from this model's parameters" in line


@pytest.mark.faults
def test_a_fault_of_ours_does_not_reach_the_loop(swallowed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(discovery, "trainers", fail)
    net = model()
    Loop(net, sgd(*net.parameters())).run(2)
    assert len(swallowed) == 1
    assert "attaching at the first step" in swallowed[0]


def test_a_forked_child_is_not_the_run(daemon: FakeDaemon) -> None:
    net = model()
    Loop(net, sgd(*net.parameters())).run(1)
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            other = model()
            Loop(other, sgd(*other.parameters())).run(1)
            failed = len(list_sessions())
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_optimizer_without_a_hash_steps_on(daemon: FakeDaemon) -> None:
    class Same(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    net = model()
    optimizer = Same(net.parameters(), lr=1e-2)
    loss_of(net, next(batches(1))).backward()
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
