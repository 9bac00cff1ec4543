"""History of one run: a SQLite file in WAL mode, columns packed 256 steps a blob.

    layout      tables, schema, how columns are packed
    writer      Store: what a daemon writes, queued and then in one transaction
    reader      History: what all readers use, live or ended
    thinning    which old steps are kept
    retention   which files are deleted

Each run has its own file, so that damage costs one run, and old runs are deleted by unlink.
"""

from __future__ import annotations

from sentinel.store.layout import CHUNK_STEPS, RUN, SCHEMA
from sentinel.store.reader import FIRST, History, Series, StoredEvent, is_blank
from sentinel.store.writer import CLOSING_SECONDS, FLUSH_SECONDS, PATIENCE_SECONDS, Store

__all__ = [
    "CHUNK_STEPS",
    "CLOSING_SECONDS",
    "FIRST",
    "FLUSH_SECONDS",
    "PATIENCE_SECONDS",
    "RUN",
    "SCHEMA",
    "History",
    "Series",
    "Store",
    "StoredEvent",
    "is_blank",
]
