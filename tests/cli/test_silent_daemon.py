"""Commands with a daemon that accepts connections and does not answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sentinel.errors import ProtocolError
from sentinel.node.question import ask_daemon


def test_a_daemon_that_is_stopped_is_named_with_what_it_may_be() -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind("")  # an abstract name, chosen by the kernel
        stopped.listen()  # the kernel accepts connections
        name = stopped.getsockname().decode()
        with pytest.raises(ProtocolError, match=r"has not answered within 0\.05 s: it is stopped, or very busy"):
            ask_daemon(Path(name), "status", timeout=0.05)
