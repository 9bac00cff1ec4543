"""What this rank did in collectives, and how far its loader came: for a diagnosis across ranks, when the run stands.

torch's flight recorder is read on a thread of its own, which a collective that waits does not hold up. It takes 0.2 ms
for ten entries, 2 ms for its whole ring of 2,000.
"""

from __future__ import annotations

import json

import msgspec
import torch.distributed as dist

from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.torch_interop.internals import default_group_seconds, flight_record_dumps, list_group_members
from sentinel.wire.flight_recorder import Flight, flight_of, merge_flights


def read_flight_record(accumulator: StepAccumulator) -> Flight:
    """As far as this torch can tell: without process groups, or before it recorded gloo, there are no collectives."""
    recorders = flight_record_dumps() if _is_initialized() else []
    members = list_group_members() if recorders else {}
    flight = merge_flights([flight_of(json.loads(dump()), members) for dump in recorders])
    return msgspec.structs.replace(
        flight, batches=accumulator.loader_progress.batches, exhausted=accumulator.loader_progress.exhausted
    )


def timeout_seconds() -> float:
    """After which the default process group gives up; 0: there is none, or it does not say."""
    return default_group_seconds() if _is_initialized() else 0.0


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
