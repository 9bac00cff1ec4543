"""What this rank did in collectives, and how far its loader came: for a diagnosis across ranks, when the run stands.

torch's flight recorder is read on the sender's thread, which a collective that waits does not hold up. It takes 0.2 ms
for ten entries, 2 ms for its whole ring of 2,000.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from sentinel.flight import Flight, flight_of
from sentinel.hooks.tally import Ledger


def recorded(ledger: Ledger) -> Flight:
    """As far as this torch can tell: without process groups, or before it recorded gloo, there are no collectives."""
    dump = _recorder()
    flight = flight_of(json.loads(dump()), _members()) if dump is not None and _initialized() else Flight()
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


def _recorder() -> Callable[[], bytes] | None:
    return getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)


def _members() -> dict[str, list[int]]:
    return {group.group_name: dist.get_process_group_ranks(group) for group in dist.distributed_c10d._world.pg_map}
