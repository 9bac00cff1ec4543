"""Peers of different versions: another protocol is refused with a message by both, another version reported by both."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

import sentinel
from sentinel import wire
from sentinel._version import __version__
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import sentinel as command
from tests.hooks.conftest import FakeDaemon, daemon
from tests.hooks.loops import Loop, model
from tests.hooks.sessions import find_session

__all__ = ["daemon"]


def raw(**message: object) -> bytes:
    """Return a frame that this version may not know."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def trained(steps: int = 3) -> str:
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    monitor = sentinel.attach(net, loop.optimizer)
    find_session(monitor).sender.join(20)
    loop.run(steps)
    return monitor.state


@pytest.mark.parametrize(
    "answer",
    [
        raw(type="welcome", protocol=9, hello="du"),
        raw(type="refused", protocol=9, reason="you speak protocol 1, this daemon speaks 9"),
        raw(type="grüezi", protocol=9),
    ],
)
def test_a_rank_refuses_a_daemon_of_another_protocol(
    answer: bytes, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = lambda _: answer
    assert trained().startswith("unmonitored: the daemon at")
    told = capsys.readouterr().err
    assert told.count(f"speaks protocol 9, this process (training-sentinel {__version__}) speaks {wire.PROTOCOL}") == 1
    assert "install the same version of training-sentinel on both sides; training goes on unmonitored" in told


@pytest.mark.processes
def test_a_daemon_refuses_another_protocol_and_says_so_in_its_log() -> None:
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            rank.send_raw(raw(type="hello", protocol=9, who="?"))
            reason = rank.expect(wire.Refused).reason
            assert "you speak protocol 9" in reason
            assert "install the same version of training-sentinel on both sides" in reason
        assert process.poll() is None
        process.terminate()
        assert process.stderr is not None
        assert "you speak protocol 9" in process.stderr.read().decode()


def test_the_command_line_says_that_a_daemon_is_of_another_protocol(daemon: FakeDaemon, tmp_path: Path) -> None:
    def refuse(_: wire.FromRank) -> None:
        daemon._peers[-1].sendall(raw(type="refused", protocol=9, reason="you speak protocol 1, this daemon 9"))

    daemon._take = lambda peer, message: refuse(message)  # type: ignore[method-assign]
    done: subprocess.CompletedProcess[str] = command("incidents")
    assert done.stderr.count("you speak protocol 1, this daemon 9") == 1
    assert "Traceback" not in done.stderr


def test_another_version_of_the_same_protocol_is_reported_once(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = lambda _: wire.frame(wire.Welcome(version="99.1")) + raw(type="news", text="of tomorrow")
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    with sentinel.attach(net, loop.optimizer) as monitor:
        loop.run(3)
        daemon.wait(lambda: 2 in daemon.seqs())
        daemon.hang_up()
        daemon.wait(lambda: len(daemon.of(wire.Hello)) == 2)
        loop.run(3)
        daemon.wait(lambda: 5 in daemon.seqs())
        assert monitor.state == "streaming"
    assert capsys.readouterr().err.count(f"the daemon is training-sentinel 99.1, this process {__version__}") == 1


@pytest.mark.processes
def test_the_daemon_reports_another_version_too_and_skips_unknown_messages() -> None:
    with daemon_process() as (path, process):
        for _ in range(2):
            with SimulatedRank(path) as rank:
                rank.hello()
                rank.send_raw(raw(type="news", text="of tomorrow"))
                rank.steps(0, [float("nan")])
                rank.expect(wire.Notice)
        process.terminate()
        assert process.stderr is not None
        assert process.stderr.read().decode().count(f"train runs training-sentinel test, this is {__version__}") == 1
