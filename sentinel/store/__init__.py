"""History of one run: a SQLite file in WAL mode, columns packed 256 steps a blob.

    layout      tables, schema, how columns are packed
    writer      Store: what a daemon writes, queued and then in one transaction
    reader      History: what everybody reads, live or ended
    thinning    what stays of steps that are far behind
    retention   which files are to go

One file a run, so that a damaged one costs one run, and old ones go by unlink.
"""

from __future__ import annotations

from sentinel.store.layout import CHUNK_STEPS, RUN, SCHEMA
from sentinel.store.reader import History, Series, StoredEvent, is_blank
from sentinel.store.writer import CLOSING_SECONDS, FLUSH_SECONDS, PATIENCE_SECONDS, Store

__all__ = [
    "CHUNK_STEPS",
    "CLOSING_SECONDS",
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
