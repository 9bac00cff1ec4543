"""A rank that must leave the run with all others, at the agreed step, with exit status 87."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.errors import EXIT_BY_RULE, AttachError
from sentinel.hooks.session.backward_passes import LOOK_PASSES
from sentinel.hooks.session.monitor import Monitor
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, fit, model, sgd

REASON = "NonFiniteLoss: the loss is not finite"


def loop() -> Loop:
    net = model()
    return Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def agree(daemon: FakeDaemon, at: int) -> None:
    """Have the rank promise to leave at the exit of step `at`, and commit."""
    daemon.wait(lambda: daemon.of(wire.Hello))
    daemon.send(wire.Prepare(id=1, at=at, to=-1, stops=True))
    daemon.wait(lambda: daemon.of(wire.Prepared))
    assert daemon.of(wire.Prepared)[0].ok
    daemon.send(wire.Commit(id=1, reason=REASON))


@pytest.mark.parametrize("rollback", [None, sentinel.Rollback(every=4, margin=2)])
def test_a_rank_leaves_at_the_step_and_calls_the_users_function(
    rollback: sentinel.Rollback | None, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = loop()
    called: list[Any] = []

    def train(monitor: Monitor) -> None:
        monitor.on_stop(lambda step: called.append((step, watched.net[0].weight.detach().clone())))  # type: ignore[index]
        agree(daemon, 3)
        for step in range(9):
            try:
                watched.run(1)
            except Exception:  # as in a loop that skips whatever fails in a batch
                called.append(step)

    with (
        pytest.raises(SystemExit) as end,
        sentinel.attach(watched.net, watched.optimizer, step=100, rollback=rollback) as m,
    ):
        train(m)
    assert end.value.code == EXIT_BY_RULE == 87
    ((step, weight),) = called
    assert step == 103
    assert torch.equal(weight, watched.net[0].weight), "nothing was trained after it"  # type: ignore[index]
    assert daemon.ended_as(reason="stopped", next_seq=4, detail=REASON, status=87)
    assert daemon.seqs() == [0, 1, 2, 3], "the step at which it left is told, too"
    (answer,) = daemon.of(wire.RolledBack)
    assert (answer.ok, answer.at) == (True, 3)
    assert [phase.name for phase in daemon.of(wire.PhaseChanged)] == ["stop"], "what the functions take is no hang"
    said = capsys.readouterr().err
    assert f"sentinel: the run is stopped at step 103, on all ranks, with exit code 87: {REASON}" in " ".join(
        said.split()
    )


@pytest.mark.parametrize("error", [ZeroDivisionError("of the user's"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_function_raises_is_printed_and_changes_nothing(
    error: BaseException, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    watched, called = loop(), []

    def fail(step: int) -> None:
        raise error

    def train() -> None:
        with sentinel.attach(watched.net, watched.optimizer) as monitor:
            monitor.on_stop(fail)
            monitor.on_stop(called.append)
            agree(daemon, 2)
            watched.run(9)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 87
    assert called == [2], "the next function has its turn"
    said = capsys.readouterr().err
    assert "sentinel: on_stop:" in said
    assert type(error).__name__ in said


def test_a_rank_goes_on_after_an_abort(daemon: FakeDaemon) -> None:
    watched, called = loop(), []
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        monitor.on_stop(called.append)
        daemon.wait(lambda: daemon.of(wire.Hello))
        daemon.send(wire.Prepare(id=1, at=3, to=-1, stops=True))
        daemon.wait(lambda: daemon.of(wire.Prepared))
        daemon.send(wire.Abort(id=1, reason="rank 1 is gone"))
        watched.run(9)
    assert daemon.ended().reason == "detach"
    assert (daemon.seqs(), called) == (list(range(9)), [])


def test_a_run_that_is_detached_does_not_leave(daemon: FakeDaemon) -> None:
    watched, called = loop(), []
    monitor = sentinel.attach(watched.net, watched.optimizer)
    monitor.on_stop(called.append)
    agree(daemon, 5)
    watched.run(2)
    monitor.detach()
    watched.run(9)
    assert daemon.ended().reason == "detach"
    assert called == []
    monitor.on_stop(called.append)  # and a call afterwards is no error


def test_what_was_agreed_outlives_the_daemon(daemon: FakeDaemon) -> None:
    """The daemon has committed, and all ranks know."""
    watched = loop()

    def train() -> None:
        with sentinel.attach(watched.net, watched.optimizer):
            agree(daemon, 5)
            watched.run(2)
            daemon.hang_up()
            watched.run(9)

    with pytest.raises(SystemExit) as end:
        train()
    assert end.value.code == 87


def test_a_rank_whose_optimizer_steps_inside_the_backward_pass_says_that_it_cannot(daemon: FakeDaemon) -> None:
    net = model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-3) for parameter in net.parameters()}
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda one, its=optimizer: its.step())  # type: ignore[misc]
    with sentinel.attach(net, list(optimizers.values())):
        assert daemon_hello(daemon).takes_stop
        for batch in torch.randn(5, 8, 6):
            net(batch).square().mean().backward()
        daemon.wait(lambda: len(daemon.of(wire.Hello)) > 1)
        assert not daemon.of(wire.Hello)[-1].takes_stop


def daemon_hello(daemon: FakeDaemon) -> wire.Hello:
    daemon.wait(lambda: daemon.of(wire.Hello))
    return daemon.of(wire.Hello)[-1]


def test_an_order_to_roll_back_is_refused_where_no_rollback_is_armed(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        daemon_hello(daemon)
        daemon.send(wire.Prepare(id=1, at=3, to=0))
        daemon.wait(lambda: daemon.of(wire.Prepared))
        watched.run(9)
    assert [(answer.ok, answer.reason) for answer in daemon.of(wire.Prepared)] == [(False, "no rollback is armed")]


def test_the_functions_follow_to_an_optimizer_that_takes_over(daemon: FakeDaemon) -> None:
    net, called = model(), []
    first = sgd(net)
    monitor = sentinel.attach(net, first, step=100)
    monitor.on_stop(called.append)
    fit(net, first, 5)
    second = sgd(net)
    fit(net, second, LOOK_PASSES + 10)
    daemon.wait(lambda: len(daemon.of(wire.Hello)) > 1)
    agree(daemon, 50)
    with pytest.raises(SystemExit):
        fit(net, second, 100)
    assert called == [daemon.of(wire.Hello)[-1].step_offset + 50]


def test_functions_at_a_stop_hold_nothing_alive(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer)
    monitor.on_stop(lambda step, net=net: None)
    fit(net, optimizer, 2)
    alive = weakref.ref(net)
    del optimizer, net
    gc.collect()
    assert alive() is None
    daemon.ended()


# What the user may write.


@pytest.mark.parametrize("names", ["NonFiniteLoss", [1], [""], ["loss > 3"], {"NonFiniteLoss"}])
def test_names_that_cannot_be_alerts_are_refused(names: Any) -> None:
    watched = loop()
    with pytest.raises(AttachError, match=r"stop_on=.*a list of names of alerts, like"):
        sentinel.attach(watched.net, watched.optimizer, stop_on=names)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "10"])
def test_a_limit_that_is_no_positive_number_is_refused(seconds: Any, daemon: FakeDaemon) -> None:
    watched = loop()
    with (
        sentinel.attach(watched.net, watched.optimizer) as monitor,
        pytest.raises(AttachError, match=r"on_stop.seconds=.*must be a number over 0"),
    ):
        monitor.on_stop(print, seconds=seconds)


@pytest.mark.parametrize("method", ["on_alert", "on_rollback", "on_stop"])
def test_what_is_not_a_function_is_refused(method: str, daemon: FakeDaemon) -> None:
    watched = loop()
    with (
        sentinel.attach(watched.net, watched.optimizer) as monitor,
        pytest.raises(AttachError, match=rf"{method}\(function\): got a NoneType; pass the function itself"),
    ):
        getattr(monitor, method)(None)


def test_alerts_are_named_to_the_daemon_and_one_too_old_to_stop_is_reported(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = lambda _: wire.frame(wire.Welcome(version="0.1"))  # it ignores what it does not know
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer, stop_on=["NonFiniteLoss"]):
        assert daemon_hello(daemon).stop_on == ("NonFiniteLoss",)
        watched.run(3)
    daemon.ended()
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "attach(stop_on=...): the daemon is training-sentinel 0.1, which does not know it: no alert stops this" in said
    )
