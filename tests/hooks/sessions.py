"""Finds the sessions behind monitors: the only module in which tests use what `attach` keeps private."""

from __future__ import annotations

from pathlib import Path

import sentinel
from sentinel.hooks.loop import patches
from sentinel.hooks.session import registry
from sentinel.hooks.session.session import RunSession
from sentinel.hooks.transport.heartbeat_writer import HeartbeatWriter
from sentinel.wire.heartbeat_page import SIGNAL


def find_session(monitor: sentinel.Monitor) -> RunSession:
    """Return the session of a monitor that watches something."""
    session = monitor._session
    assert session is not None
    return session


def find_heartbeat_writer(monitor: sentinel.Monitor) -> HeartbeatWriter:
    """Return the heartbeat writer of a run whose heartbeats the daemon can see."""
    writer = find_session(monitor).sender.heartbeat_writer
    assert writer is not None
    return writer


def list_sessions() -> list[RunSession]:
    """Return this process's sessions, the newest last; ended ones stay until the next one begins."""
    return registry.sessions


def list_patches() -> tuple[str, ...]:
    """Return what is patched now, as `owner.name`."""
    return tuple(f"{getattr(patch.owner, '__name__', patch.owner)}.{patch.name}" for patch in patches._patches)


def is_signal_caught() -> bool:
    """Return whether this process handles the signal that dumps its stacks, in Python or in C."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
