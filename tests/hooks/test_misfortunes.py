"""Failures in the user's code, of the daemon, and in other packages: training goes on."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sentinel
from sentinel import wire
from sentinel.hooks.core import faults
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.rollback.agreement import TwoPhaseCommit
from sentinel.hooks.session import registry
from sentinel.hooks.session.command_handler import CommandHandler
from sentinel.hooks.transport.daemon_launcher import DaemonLocator
from tests.hooks import loops
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import fit, sgd
from tests.hooks.sessions import is_signal_caught, list_sessions


def test_a_stop_that_cannot_print_its_message(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    net = loops.model()
    optimizer = sgd(net)
    sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=2, margin=0))
    fit(net, optimizer, 1)
    daemon.wait(lambda: daemon.of(wire.Hello))
    restorer = list_sessions()[-1].restorer
    assert restorer is not None
    restorer.receive(wire.Stop(reason="enough"))
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(SystemExit):
        fit(net, optimizer, 1)


@pytest.mark.faults
def test_a_value_that_is_no_number(daemon: FakeDaemon, swallowed: list[str]) -> None:
    class Broken(Probe):
        signals = {"broken": "rank"}

        def after(self, step: Step) -> None:
            step.values["broken"] = "no number"  # type: ignore[assignment]

    net = loops.model()
    optimizer = sgd(net)
    optimizer.probes = [Broken()]  # type: ignore[attr-defined]
    with sentinel.attach(net, optimizer) as monitor:
        monitor.log(nowhere=torch.zeros((), device="meta"))
        fit(net, optimizer)
    daemon.ended()
    assert len(daemon.series("loss")) == 3
    assert len(swallowed) == 1


@pytest.mark.faults
def test_a_log_handler_that_raises() -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk is full")

    handler = Raises()
    faults.log.addHandler(handler)
    try:
        with faults.swallow_faults("a test", "nothing"):
            raise ValueError
    finally:
        faults.log.removeHandler(handler)


SIGPIPE_SCRIPT = """
import signal, socket, sys
from pathlib import Path
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as scripts do that are piped into head
from sentinel import wire
from sentinel.hooks.transport.connection import DaemonConnection
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
connection = DaemonConnection(Path(sys.argv[1]))
connection.carry(tuple(map(int, sys.argv[2:])))
listener.accept()[0].close()
connection.send(wire.Goodbye())
try:
    connection.flush()
except BrokenPipeError:
    print("told")
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize("descriptors", [[], ["1"]])
def test_a_daemon_that_goes_kills_nobody(descriptors: list[str], private_places: Path) -> None:
    script = [sys.executable, "-c", SIGPIPE_SCRIPT, str(private_places / "p.sock"), *descriptors]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "told\n"), ended.stderr


@pytest.mark.faults
def test_an_exception_whose_text_cannot_be_made(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(RuntimeError):
        def __str__(self) -> str:
            raise OSError

    net = loops.model()
    optimizer = sgd(net)
    sentinel.attach(net, optimizer)
    monkeypatch.setattr(sys, "last_value", Silent(), raising=False)
    registry.leave()
    assert daemon.ended().detail == "Silent"


def test_an_exception_without_a_text(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    net = loops.model()
    sentinel.attach(net, sgd(net))
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    registry.leave()
    assert daemon.ended().detail == "KeyboardInterrupt"


def test_orders_that_make_no_sense(daemon: FakeDaemon) -> None:
    """A negative number of batches would be thrown away without end, and a rate of NaN is the end of the weights."""
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0)) as monitor:
        loader = monitor.batches(list(loops.batches(6)))
        restorer = list_sessions()[-1].restorer
        assert restorer is not None
        fit(net, optimizer, 1)
        for number, wrong in enumerate((float("nan"), 0.0, -1.0, 2.0), 1):
            restorer.receive(wire.Prepare(id=number, at=number, to=0))
            restorer.receive(wire.Commit(id=number, skip_batches=-3, lr_factor=wrong))
            fit(net, optimizer, 1)
        daemon.wait(lambda: len(daemon.of(wire.RolledBack)) == 4)
        assert all(answer.ok for answer in daemon.of(wire.RolledBack))
        assert len([batch for batch in loader if batch is not None]) == 6
        fit(net, optimizer)
    assert all(parameter.isfinite().all() for parameter in net.parameters())


@pytest.mark.faults
def test_a_program_that_closes_all_descriptors(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may do so to become a daemon. What can still be closed is closed, the signal's handler above all."""

    def closed(_: object) -> None:
        raise OSError("Bad file descriptor")

    net = loops.model()
    optimizer = sgd(net)
    monkeypatch.setattr(DaemonLocator, "close", closed)
    made, make_pair = list[socket.socket](), socket.socketpair

    def make_noted_pair() -> tuple[socket.socket, socket.socket]:
        made.extend(pair := make_pair())
        return pair

    monkeypatch.setattr(socket, "socketpair", make_noted_pair)
    monitor = sentinel.attach(net, optimizer)
    fit(net, optimizer)
    daemon.wait(lambda: daemon.of(wire.Batch))
    assert is_signal_caught() == hasattr(os, "memfd_create")
    monitor.detach()
    assert not is_signal_caught()
    assert [one.fileno() for one in made] == [-1, -1]


NUMBERS = st.sampled_from([0, 1, -1, 2, 7, 10**6, 2**52, -(2**52)])
TEXTS = st.sampled_from(["", "x", "moments", "census", "provenance", "stacks", "\x1b[31m"])
REALS = st.sampled_from([0.0, 0.5, -1.0, float("nan"), float("inf"), 1e308])
MESSAGES = st.one_of(
    st.builds(wire.Kept, frames=NUMBERS),
    st.builds(wire.Attend, steps=NUMBERS),
    st.builds(wire.Withhold, steps=NUMBERS),
    st.builds(wire.DaemonCost, share=REALS),
    st.builds(
        wire.Spacing, at=NUMBERS, tiers=st.dictionaries(st.sampled_from(["0", "1", "2", "3", "9", "-1"]), NUMBERS)
    ),
    st.builds(wire.Prepare, id=NUMBERS, at=NUMBERS, to=NUMBERS),
    st.builds(wire.Commit, id=NUMBERS, skip_batches=NUMBERS, lr_factor=REALS),
    st.builds(wire.Abort, id=NUMBERS),
    st.builds(wire.Held, seq=NUMBERS),
    st.builds(wire.Publish, id=NUMBERS, seq=NUMBERS, step=NUMBERS, run=TEXTS, run_id=TEXTS, attempt=NUMBERS),
    st.builds(wire.CancelPublish, id=NUMBERS),
    st.builds(wire.Ask, id=NUMBERS, what=TEXTS),
    st.builds(wire.Notice, id=TEXTS, text=TEXTS),
)


@pytest.mark.slow
@pytest.mark.faults
@given(st.lists(MESSAGES, max_size=8))
@settings(
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_order_of_the_daemons(daemon: FakeDaemon, swallowed: list[str], messages: list[wire.ToRank]) -> None:
    """With steps, snapshots and ids that do not exist, and senseless numbers, the loop goes on with finite weights."""
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0))
    session = list_sessions()[-1]
    assert session.restorer is not None
    with pytest.MonkeyPatch.context() as hasty:
        wait = TwoPhaseCommit.wait
        hasty.setattr(TwoPhaseCommit, "wait", lambda promise, seconds: wait(promise, 0.0))
        for message in messages:
            CommandHandler(session).receive(message)
            fit(net, optimizer, 1)
    assert session.next_seq == len(messages)
    assert session.monitors[0].alive()
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    session.end(wire.Goodbye(reason="detach"), 0.0)
    session.sender.join(20)
    assert monitor.state == "detached"
    assert not [text for text in swallowed if "no verdict" not in text], "which is said of a promise, and no fault"
