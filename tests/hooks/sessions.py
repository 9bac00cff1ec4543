"""Finds the sessions behind monitors: the only module in which tests use what `attach` keeps private."""

from __future__ import annotations

import sentinel
from sentinel.hooks.loop import patches
from sentinel.hooks.session import registry
from sentinel.hooks.session.session import RunSession
from sentinel.hooks.transport.heartbeat_writer import HeartbeatWriter


def find_session(monitor: sentinel.Monitor) -> RunSession:
    """Return the session of a monitor that watches something."""
    assert monitor._session is not None
    return monitor._session


def find_heartbeat_writer(monitor: sentinel.Monitor) -> HeartbeatWriter:
    """Return the heartbeat writer of a run whose heartbeats the daemon can see."""
    writer = find_session(monitor).sender._heartbeat_writer
    assert writer is not None
    return writer


def list_sessions() -> list[RunSession]:
    """Return this process's sessions, the newest last; ended ones stay until the next one begins."""
    return registry._sessions


def list_patches() -> tuple[str, ...]:
    """Return what is patched now, as `owner.name`."""
    return tuple(f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}" for patch in patches._patches)
