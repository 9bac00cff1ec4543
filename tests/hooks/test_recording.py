"""SENTINEL_RECORD: the frames go into a file, no daemon is started, and the file's size is limited."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.hooks.transport import connection, heartbeat_writer
from sentinel.node import paths
from tests.hooks.loops import Loop, model
from tests.hooks.sessions import find_session, list_patches


def recorded(path: Path) -> list[wire.FromRank]:
    return [wire.from_rank(body) for body in wire.Frames().feed(path.read_bytes())]


def run(steps: int = 6, **options: Any) -> tuple[list[float], str]:
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    with sentinel.attach(net, loop.optimizer, **options) as monitor:
        losses = loop.run(steps)
        find_session(monitor).sender.wake()
        state = monitor.state
    return losses, state


def seqs(messages: list[wire.FromRank]) -> list[int]:
    return [
        seq for m in messages if isinstance(m, wire.Batch) and m.stream == 0 for seq in wire.unpack_column("q", m.seqs)
    ]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run.rec"
    monkeypatch.setenv("SENTINEL_RECORD", str(path))
    return path


def test_what_a_daemon_would_get_is_in_the_file(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    messages = recorded(record)
    assert isinstance(messages[0], wire.Hello)
    assert isinstance(messages[-1], wire.Goodbye)
    assert seqs(messages) == list(range(6))
    assert any(isinstance(message, wire.LayerTable) for message in messages)
    assert f"sentinel replay {record}" in capsys.readouterr().err
    assert not paths.runtime_root().exists(), "no daemon"


def test_what_cannot_be_opened_leaves_no_file_and_no_descriptor_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again every half second."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(heartbeat_writer, "_caught", fail)
    monkeypatch.setattr(connection.socket, "socketpair", fail)
    for _ in range(3):
        with pytest.raises(OSError, match="too many"):
            heartbeat_writer.StackDumps()
        with pytest.raises(OSError, match="too many"):
            connection.Recorder(tmp_path / "run.rec")
    assert len(os.listdir("/proc/self/fd")) == before
    assert not list(tmp_path.iterdir())


def test_a_record_is_never_written_over(record: Path) -> None:
    run(2)
    first = record.read_bytes()
    run(3)
    assert record.read_bytes() == first
    assert seqs(recorded(record.with_name("run.rec-2"))) == [0, 1, 2]


def test_a_record_ends_at_its_limit_with_a_message(
    record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection, "LIMIT", 9000)
    monkeypatch.setattr("sentinel.hooks.transport.sender.INTERVAL_SECONDS", 0.001)
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    with sentinel.attach(net, loop.optimizer) as monitor:
        while monitor.state != "unmonitored" and not monitor.state.startswith("unmonitored"):
            loop.run(20)
        loop.run(1)
        assert list_patches() == ()
    assert record.stat().st_size <= 9000
    assert seqs(recorded(record))
    assert capsys.readouterr().err.count("has reached") == 1


@pytest.mark.parametrize(
    ("template", "world", "expected"),
    [("a.rec", 1, "a.rec"), ("a.rec", 4, "a.rec.3"), ("a.{rank}.rec", 4, "a.3.rec"), ("{rank}/a", 1, "3/a")],
)
def test_each_rank_has_its_own_file(template: str, world: int, expected: str) -> None:
    identity = wire.Identity(run="r", run_id="r", rank=3, world_size=world)
    assert connection.name_file(template, identity) == Path(expected)


def test_a_place_that_cannot_be_written_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SENTINEL_RECORD", str(tmp_path / "missing" / "run.rec"))
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    monitor = sentinel.attach(net, loop.optimizer)
    find_session(monitor).sender.join(20)
    loop.run(2)
    told = capsys.readouterr().err
    assert f"SENTINEL_RECORD={tmp_path}/missing/run.rec: cannot be written (No such file or directory)" in told
    assert "training goes on" in told
