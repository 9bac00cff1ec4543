"""Rejected connections are counted, from the kernel's table; those of the job's nodes are not."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
from pathlib import Path

import pytest

from sentinel.cli import job_status
from sentinel.cluster import rejected_connections
from sentinel.cluster.rejected_connections import (
    LOOK_SECONDS,
    SETTLE_SECONDS,
    SHOWN,
    RejectedConnections,
    read_connections,
)
from sentinel.config.cluster import Meeting
from tests.cluster.job import RUN, SECRET, free_address
from tests.cluster.listener import Listener
from tests.waiting import until

NODE, STRANGER = "0700000A:9C42", "0900000A:9C43"  # 10.0.0.7, 10.0.0.9
ESTABLISHED, FIN_WAIT1, FIN_WAIT2, TIME_WAIT = "01", "04", "05", "06"
LATER = 10 * SETTLE_SECONDS

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0 1 1 0000000000000000 100 0 0 10 0\n"


class Looks:
    """Looks at one table after the other, on a node that listens on a port that was not used before."""

    def __init__(self) -> None:
        self.rejected = RejectedConnections("train")
        self.now = LATER
        self.rejected.take({}, self.now)

    def look(self, **states: str) -> None:
        """Do the next look, which finds connections in these states."""
        names = {"node": NODE, "stranger": STRANGER}
        self.now += LOOK_SECONDS
        self.rejected.take({names[name]: state for name, state in states.items()}, self.now)

    def note_node(self, after: float = 0.0) -> None:
        """Note that a link of the node begins or ends, `after` seconds from now."""
        self.rejected.note_link("tcp/10.0.0.7:40002", self.now + after)


def test_what_this_side_closed_is_counted_once_at_the_next_look(caplog: pytest.LogCaptureFixture) -> None:
    looks = Looks()
    assert looks.rejected.count == 0
    looks.look(stranger=ESTABLISHED)
    looks.look(stranger=FIN_WAIT2)
    assert looks.rejected.count == 0, "it may have been cut off from a node that is let in within a moment"
    looks.look(stranger=TIME_WAIT)
    looks.look(stranger=TIME_WAIT)
    looks.look()
    assert (looks.rejected.count, looks.rejected.addresses) == (1, ["10.0.0.9"])
    looks.look(stranger=TIME_WAIT)
    looks.look()
    assert looks.rejected.count == 2, "the same port of that machine, once more"
    (line,) = caplog.messages
    assert line == "run train: a connection from 10.0.0.9 was not let in: a wrong secret or certificate?"


def test_what_is_gone_from_the_table_before_the_next_look_is_counted() -> None:
    looks = Looks()
    looks.look(stranger=TIME_WAIT)
    looks.look()
    looks.look()
    assert looks.rejected.count == 1


def test_connections_from_before_the_node_listened_are_not_counted() -> None:
    rejected = RejectedConnections("train")
    for now in range(5):
        rejected.take({STRANGER: FIN_WAIT1 if now < 2 else TIME_WAIT}, LATER + now * LOOK_SECONDS)
    assert rejected.count == 0


def test_a_node_whose_link_ends_is_not_counted() -> None:
    looks = Looks()
    looks.note_node()
    looks.now += LATER
    looks.note_node()
    for _ in range(4):
        looks.look(node=TIME_WAIT)
    assert looks.rejected.count == 0


def test_a_node_that_was_cut_off_before_it_was_let_in_is_not_counted() -> None:
    """The network works again: the connections that the kernel tried to close are closed, and the node is let in."""
    looks = Looks()
    for _ in range(5):
        looks.look(node=FIN_WAIT1)
    looks.look(node=TIME_WAIT)
    looks.note_node(after=LOOK_SECONDS / 2)
    looks.look(node=TIME_WAIT)
    assert looks.rejected.count == 0


def test_a_stranger_on_the_machine_of_a_node_is_counted_once_that_is_settled() -> None:
    looks = Looks()
    looks.note_node()
    looks.now += SETTLE_SECONDS
    looks.look(node=TIME_WAIT)
    looks.look(node=TIME_WAIT)
    assert (looks.rejected.count, looks.rejected.addresses) == (1, ["10.0.0.7"])


def test_the_newest_addresses_are_named_and_each_once() -> None:
    rejected = RejectedConnections("train")
    rejected.take({}, LATER)
    for round_number in range(2):
        for number in range(SHOWN + 2):
            rejected.take({f"{number:02X}00000A:{round_number:04X}": TIME_WAIT}, LATER)
            rejected.take({}, LATER + LOOK_SECONDS)
    assert rejected.count == 2 * (SHOWN + 2)
    assert rejected.addresses == ["10.0.0.4", "10.0.0.3", "10.0.0.2"]
    job = {"rejected": rejected.count, "rejected_from": rejected.addresses}
    assert job_status.describe_rejected(job) == (
        "at least 10 connections not let in, last from 10.0.0.4, 10.0.0.3, 10.0.0.2: a wrong secret or certificate?"
    )
    for count in (0, None):
        assert job_status.describe_rejected({"rejected": count, "rejected_from": []}) == ""
    assert job_status.describe_rejected({}) == "", "a daemon of an earlier version"


def test_the_table_is_read_of_one_local_port_and_of_both_families(tmp_path: Path) -> None:
    ours, mapped, sixth = "0100000A:2506", f"0000000000000000FFFF0000{NODE}", "B80D0120000000000000000001000000:9C44"
    assert read_connections(0x2506, tmp_path) is None, "no table: nothing is counted"
    (tmp_path / "tcp").write_text(
        f"{HEADER}   0: 00000000:2506 00000000:0000 0A {REST}   1: {ours} {STRANGER} 06 {REST}"
        f"   2: 0100000A:9C40 {STRANGER[:8]}:2506 06 {REST}   3: 0100000A:2507 {STRANGER} 06 {REST}"
    )
    assert read_connections(0x2506, tmp_path) == {"00000000:0000": "0A", STRANGER: TIME_WAIT}
    (tmp_path / "tcp6").write_text(
        f"{HEADER}   0: {'0' * 32}:2506 {mapped} 05 {REST}   1: {'0' * 32}:2506 {sixth} 06 {REST}"
    )
    found = read_connections(0x2506, tmp_path)
    assert found == {"00000000:0000": "0A", STRANGER: TIME_WAIT, mapped: FIN_WAIT2, sixth: TIME_WAIT}
    rejected = RejectedConnections("train")
    rejected.take({}, LATER)
    rejected.note_link("tls/[2001:db8::1]:1", LATER)
    rejected.take(found, LATER)
    rejected.take(found, LATER + LOOK_SECONDS)
    assert sorted(rejected.addresses) == ["10.0.0.7", "10.0.0.9"]


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "no descriptor"), RuntimeError("can't start new thread")])
def test_after_a_look_that_fails_comes_the_next_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    rejected, found = RejectedConnections("train"), list[dict[str, str] | Exception]([error, {}])

    def read(_: int) -> dict[str, str]:
        if isinstance(one := found.pop(0), Exception):
            raise one
        return one

    async def look(now: float) -> None:
        rejected.tick(1, now)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    monkeypatch.setattr(rejected_connections, "read_connections", read)
    asyncio.run(look(LATER))
    assert rejected.count is None
    asyncio.run(look(LATER + LOOK_SECONDS))
    assert rejected.count == 0


def test_a_table_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(HEADER)
    (tmp_path / "tcp6").mkdir()
    with pytest.raises(IsADirectoryError):
        read_connections(1, tmp_path)


@pytest.mark.processes
@pytest.mark.skipif(read_connections(1) is None, reason="the kernel has no table of connections")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_wrong_secret_and_garbage_are_counted_and_a_right_node_is_not(host: str) -> None:
    zenoh = pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    from sentinel.cluster.session import Session, open_session

    port = int(free_address().rpartition(":")[2])
    rejected, clock, listener = RejectedConnections("train"), itertools.count(LATER, LATER), Listener()
    linked = listener.links

    def open_node(node: int, secret: str) -> Session:
        return Session(Meeting((f"{host}:{port}",), secret), RUN, node, listener)

    def find_closed() -> set[int]:
        """Return the other side's ports of the connections that this side closed first."""
        states = (read_connections(port) or {}).items()
        return {int(one.rpartition(":")[2], 16) for one, state in states if state in (FIN_WAIT2, TIME_WAIT)}

    def count(now: float) -> int:
        """Return the count after two looks, the first one at `now`."""
        for at in (now, now + LOOK_SECONDS):
            rejected.take(read_connections(port) or {}, at)
        assert rejected.count is not None
        return rejected.count

    def try_in_vain() -> bool:
        with pytest.raises(zenoh.ZError):
            open_session(Meeting((f"{host}:{port}",), "another secret, as long"), 1)
        return bool(find_closed())

    with contextlib.closing(open_node(0, SECRET)), contextlib.ExitStack() as stack:
        rejected.take({}, next(clock))
        until(try_in_vain, "a connection with another secret to be closed by this side")
        wrong, garbage = count(next(clock)), set[int]()
        assert wrong > 0
        assert rejected.addresses == [host.strip("[]")]
        for _ in range(3):
            connection = stack.enter_context(socket.create_connection((host.strip("[]"), port), timeout=60))
            garbage.add(connection.getsockname()[1])
            connection.send(b"\xff\xff")  # a message that is longer than any
        until(lambda: garbage <= find_closed(), "Zenoh to close them")
        strangers = count(next(clock))
        assert strangers >= wrong + len(garbage)
        assert linked == []

        def come_and_go() -> bool:
            open_node(1, SECRET).close()
            return not find_closed().isdisjoint(int(one.rpartition(":")[2]) for one in linked)

        until(come_and_go, "a right node's connection to be closed by this side")
        now = next(clock)
        for other_side in linked:
            rejected.note_link(other_side, now)
        assert count(now) == strangers
