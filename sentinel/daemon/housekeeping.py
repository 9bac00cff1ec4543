"""Deletes histories that are over the limits: when a daemon starts, and every hour while it stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from sentinel.config import History
from sentinel.store import retention

log = logging.getLogger(__name__)

PAUSE_SECONDS = 3600.0


async def keep_house(folders: Callable[[], list[Path]], limits: History) -> None:
    """For ever. `folders` may read the disk, and is called on a thread; a user has one, with limits of their own."""
    while True:
        try:
            await asyncio.to_thread(_prune, folders, limits)
        except Exception:
            log.exception("histories that are over the limits stay")
        await asyncio.sleep(PAUSE_SECONDS)


def _prune(folders: Callable[[], list[Path]], limits: History) -> None:
    for folder in folders():
        for one in retention.prune(folder, max_age=limits.max_age, max_bytes=limits.max_size):
            log.info("%s: deleted, over [history] max_%s", one.kept.path, one.why)
