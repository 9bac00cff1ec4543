"""The sessions behind monitors: the one place where tests reach for what `attach` keeps to itself."""

from __future__ import annotations

import sentinel
from sentinel.hooks.session import registry
from sentinel.hooks.session.session import RunSession
from sentinel.hooks.transport.heartbeat_writer import HeartbeatWriter


def find_session(monitor: sentinel.Monitor) -> RunSession:
    """That of a monitor that watches something."""
    assert monitor._session is not None
    return monitor._session


def find_heartbeat_writer(monitor: sentinel.Monitor) -> HeartbeatWriter:
    """Of a run whose heartbeat the daemon can see."""
    writer = find_session(monitor).sender._heartbeat_writer
    assert writer is not None
    return writer


def list_sessions() -> list[RunSession]:
    """Those of this process, the newest last; ended ones until the next one begins."""
    return registry._sessions
