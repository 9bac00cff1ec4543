"""A node's connection to the others, without a network: which addresses are tried, and when."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sentinel.cluster.connection import CONNECT_AGAIN_SECONDS, Connection
from sentinel.config.cluster import Meeting
from tests.cluster.job import free_address
from tests.waiting import until

MEETING = Meeting(("10.0.0.1:1", "10.0.0.2:1"), "", is_public=True)

UNKNOWN = "no-such-host.invalid"


class Opened:
    """A session; it is closed once `may_close` is set."""

    def __init__(self) -> None:
        self.may_close, self.closing = threading.Event(), threading.Event()

    def close(self) -> None:
        self.closing.set()
        assert self.may_close.wait(60)


class Node:
    """Node 1: the owner of its connection, its run, and a loop that makes each call at once."""

    def __init__(self, open_session: Callable[[Meeting], Any], meeting: Meeting = MEETING) -> None:
        self.said: list[str] = []
        this: Any = self
        self.connection = Connection(meeting, 1, this, this, this)
        self.open_session, self.tell = open_session, self.said.append
        self._now = 0.0

    def tick(self) -> None:
        """Let one try be due; returns once it has ended, or if none is made."""
        self._now += CONNECT_AGAIN_SECONDS
        self.connection.tick(self._now)
        if (thread := self.connection._thread) is not None:
            thread.join(60)

    def begin_session(self, session: Any) -> None:
        pass

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)


def test_an_address_is_listened_on_again_once_the_session_before_is_closed() -> None:
    opened: list[Opened] = []

    def open_session(_: Meeting) -> Opened:
        opened.append(Opened())
        return opened[-1]

    node = Node(open_session)
    node.tick()
    node.connection.move(MEETING._replace(secret="of another start"))
    assert opened[0].closing.wait(60)
    node.tick()
    assert len(opened) == 1, "the port is taken by the one before"
    opened[0].may_close.set()

    def is_open() -> bool:
        node.tick()
        return node.connection.session is not None

    until(is_open, "the next session")
    assert len(opened) == 2


def refuse_to_listen(tried: list[Meeting]) -> Callable[[Meeting], Opened]:
    """Return a function that opens a session of a node 1 whose address is taken."""

    def open_session(meeting: Meeting) -> Opened:
        tried.append(meeting)
        if len(meeting.addresses) > 1:
            raise OSError("address in use")
        return Opened()

    return open_session


def test_a_node_that_cannot_listen_at_a_found_address_connects_and_does_not_take_over() -> None:
    tried: list[Meeting] = []
    node = Node(refuse_to_listen(tried), MEETING._replace(is_found=True))
    node.tick()
    node.tick()
    assert node.connection.session is not None
    assert [meeting.addresses for meeting in tried] == [MEETING.addresses, MEETING.addresses[:1]]
    assert node.said == ["node 1 cannot listen at 10.0.0.2:1: it does not take over"]


def test_an_address_of_the_settings_is_tried_again() -> None:
    tried: list[Meeting] = []
    node = Node(refuse_to_listen(tried))
    node.tick()
    node.tick()
    assert tried == [MEETING, MEETING]
    assert [line.partition(":")[0] for line in node.said] == ["cannot listen on 10.0.0.2"]


def test_it_is_reported_that_an_address_can_be_listened_on_after_all() -> None:
    faults = [OSError("address in use")]

    def open_session(_: Meeting) -> Opened:
        if faults:
            raise faults.pop()
        return Opened()

    node = Node(open_session)
    node.tick()
    assert node.said == ["cannot listen on 10.0.0.2:1: the address is not of this node; tried again"]
    node.tick()
    assert node.said[1:] == ["the job's other nodes can reach this one now"]


def look_up_unknown_host() -> str:
    """Return the system's word for a name that nothing knows, with a network or without."""
    with pytest.raises(socket.gaierror) as found:
        socket.getaddrinfo(UNKNOWN, 1)
    return str(found.value.strerror)


def fail_to_open(_: Meeting) -> Opened:
    raise OSError("a fault that the system is not asked about")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (f"{UNKNOWN}:9478", f"cannot listen on {UNKNOWN}:9478: {{unknown}}; tried again"),
        ("a..b:9478", "cannot listen on a..b:9478: no host name; tried again"),
        ("{free}", "cannot listen on {free}: the daemon's log has the reason; tried again"),
        ("{taken}", "cannot listen on {taken}: the port is taken; tried again"),
    ],
)
def test_only_the_reason_that_holds_is_given_where_a_node_cannot_listen(address: str, said: str) -> None:
    """It was always `the port is taken, or the address is not of this node`, also for a name that nothing knows."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        places = {"free": free_address(), "taken": taken, "unknown": look_up_unknown_host()}
        node = Node(fail_to_open, Meeting(("10.0.0.1:1", address.format(**places)), ""))
        node.tick()
        assert node.said == [said.format(**places)]


def test_an_address_whose_name_is_not_known_is_named() -> None:
    node = Node(fail_to_open, Meeting((f"{UNKNOWN}:9478",), ""))
    node.tick()
    why = f"{UNKNOWN} is not known here ({look_up_unknown_host()})"
    assert node.connection.trouble == f"cannot reach {UNKNOWN}:9478: {why}; tried again"


def test_a_node_listens_where_no_file_can_be_written(tmp_path: Path) -> None:
    """Its users were written into a file in /tmp: on a full disk each node was watched alone."""
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    code = (
        "import resource, signal, sys\n"
        "from sentinel.cluster.session import open_session\n"
        "from sentinel.config.cluster import Meeting\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "open_session(Meeting((sys.argv[1],), 'a secret of all nodes'), 0).close()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, free_address()], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
