"""Whether the daemon sees what it should: while it does not, its heartbeats are withheld."""

from __future__ import annotations

from collections.abc import Iterable

from sentinel.daemon.run.watched_run import WatchedRun

SILENT_SECONDS = 120.0
"""A connected rank without a heartbeat page counts as unseen when it has sent nothing for this many seconds."""


def reason(watches: Iterable[WatchedRun], now: float) -> str:
    """Return why the daemon is blind, or "" if it sees. A run without connected ranks is over, and is not looked at."""
    for watch in watches:
        live = watch.run.attempt.live
        if not live:
            continue
        if watch.faulty:
            return f"run {watch.run.name}: its rules raise; the daemon's log says why"
        if watch.store is None or watch.store.trouble:
            return f"run {watch.run.name}: its history is not written"
        silent = [rank for rank in live if rank.heartbeat is None and now - rank.heard > SILENT_SECONDS]
        if len(silent) == len(live):
            return f"run {watch.run.name}: nothing was heard for {now - max(rank.heard for rank in live):.0f} s"
    return ""
