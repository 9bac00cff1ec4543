"""Deletes histories that exceed the limits: when a daemon starts, and every hour while it runs."""

from __future__ import annotations

import asyncio
import logging

from sentinel.config.settings import HistorySettings
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.store import retention

log = logging.getLogger(__name__)

PAUSE_SECONDS = 3600.0
"""Seconds between two rounds."""


async def keep_house(tenants: Tenants, limits: HistorySettings) -> None:
    """Delete histories over these limits, which hold for each user's histories, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(_prune, tenants, limits)
        except Exception:
            log.exception("histories that are over the limits stay")
        await asyncio.sleep(PAUSE_SECONDS)


def _prune(tenants: Tenants, limits: HistorySettings) -> None:
    for folder in tenants.folders():
        for one in retention.prune(folder, max_age=limits.max_age, max_bytes=limits.max_size):
            log.info("%s: deleted, over [history] max_%s", one.kept.path, one.why)
