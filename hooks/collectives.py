"""What this rank did in collectives, and how far its loader came: for a diagnosis across ranks, when the run stands.

torch's flight recorder is read on a thread of its own, which a collective that waits does not hold up. It takes 0.2 ms
for ten entries, 2 ms for its whole ring of 2,000.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from sentinel.flight import Flight, flight_of
from sentinel.hooks.tally import Ledger


def recorded(ledger: Ledger) -> Flight:
    """As far as this torch can tell: without process groups, or before it recorded gloo, there are no collectives."""
    dumps = [json.loads(dump()) for dump in _recorders()] if _initialized() else []
    flight = flight_of(_together(dumps), _members()) if dumps else Flight()
    return msgspec.structs.replace(flight, batches=ledger.feeds.batches, exhausted=ledger.feeds.exhausted)


def timeout_seconds() -> float:
    """After which the default process group gives up; 0: there is none, or it does not say."""
    if not _initialized():
        return 0.0
    try:
        group = dist.distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        return min(backend.options._timeout.total_seconds() for backend in backends)
    except (AttributeError, RuntimeError, ValueError):  # private names come and go
        return 0.0


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _recorders() -> list[Callable[[], bytes]]:
    """NCCL records into a ring of its own, which the one of all backends does not show in every version of torch. It is
    first: of a group that has gloo for the CPU beside it, NCCL's are the collectives that train."""
    module = getattr(torch._C, "_distributed_c10d", None)
    found = (getattr(module, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    return [dump for dump in found if dump is not None]


def _together(dumps: list[dict[str, Any]]) -> dict[str, Any]:
    """One dump of several: the collectives of a process group are of the first that has them."""
    entries: list[dict[str, Any]] = []
    known: set[str] = set()
    for dump in dumps:
        more = [entry for entry in dump.get("entries") or () if str(entry.get("process_group")) not in known]
        known.update(str(entry.get("process_group")) for entry in more)
        entries += more
    status = {name: said for dump in reversed(dumps) for name, said in (dump.get("pg_status") or {}).items()}
    return {"entries": entries, "pg_status": status}


def _members() -> dict[str, list[int]]:
    return {group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map}
