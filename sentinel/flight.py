"""What torch's flight recorder knows of a rank's collectives, whichever way it was dumped.

torch numbers the collectives of each process group from 1 on every rank; equal numbers belong together. Where ranks
disagree over one (who issued it, with what operation and sizes) is where a run stands.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. NCCL has a ring of its own, the other backends have one
together, of 2,000 by default (TORCH_FR_BUFFER_SIZE).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

KEPT = 64
"""Collectives of a group that are kept, the newest ones: ranks that stand still together are no further apart."""
GROUPS = 64


class Collective(msgspec.Struct, frozen=True):
    """One collective, as one rank issued it."""

    group: str
    """Name of its process group."""
    seq: int
    """Its number in the group."""
    op: str
    """`all_reduce`, `barrier` and so on."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its inputs."""
    done: bool = False
    created: float = 0.0
    """Unix seconds."""
    timeout: float = 0.0
    """Seconds after which the process group gives up."""

    def __str__(self) -> str:
        sizes = " and ".join("x".join(map(str, size)) or "1" for size in self.sizes[:2])
        return f"{self.op} of {sizes}" if sizes and self.op != "barrier" else self.op


class Group(msgspec.Struct, frozen=True):
    """One process group, as one rank knows it."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    """Its members; empty: not known."""
    enqueued: int = 0
    """Number of the last collective that this rank issued."""
    completed: int = 0
    """And of the last that came to its end here."""


class Flight(msgspec.Struct, frozen=True):
    """What a rank did last."""

    groups: dict[str, Group] = {}
    collectives: tuple[Collective, ...] = ()
    """The newest of each group, in rising order."""
    batches: int = -1
    """Batches that the loader gave since it last began anew; -1: not known."""
    exhausted: bool = False
    """The loader has given its last one."""

    def issued(self, group: str, seq: int) -> Collective | None:
        """What it issued as this number; None where it issued none, or that is forgotten."""
        return next((each for each in self.collectives if (each.group, each.seq) == (group, seq)), None)


def flight_of(dump: Mapping[str, Any], members: Mapping[str, Iterable[int]] | None = None) -> Flight:
    """From a dump: a dict of `entries`, `pg_config` and `pg_status`, as JSON and pickle have it. `members`: name of a
    group -> its ranks, where the dump does not say. Raises ValueError where it is no such dump."""
    entries = dump.get("entries")
    if not isinstance(entries, list):
        raise ValueError("a flight recorder's dump has `entries`")
    found: dict[str, list[Collective]] = defaultdict(list)
    descriptions: dict[str, str] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            name, descriptions[name] = _group(entry)
            found[name].append(_collective(name, entry))
    ranks = {name: tuple(map(int, each)) for name, each in (members or {}).items()} or _ranks(dump)
    groups, newest = {}, []
    for name in sorted(found, key=lambda each: -found[each][-1].created)[:GROUPS]:
        own = sorted(found[name], key=lambda each: each.seq)[-KEPT:]
        newest += own
        enqueued, completed = _progress(dump.get("pg_status") or {}, name, own)
        groups[name] = Group(name, descriptions[name], ranks.get(name, ()), enqueued, completed)
    return Flight(groups, tuple(newest))


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    named = entry.get("process_group") or (str(entry.get("pg_id", "")), "")
    return str(named[0]), str(named[1])


def _collective(group: str, entry: Mapping[str, Any]) -> Collective:
    sizes = entry.get("input_sizes") or ()
    return Collective(
        group=group,
        seq=int(entry.get("collective_seq_id", 0)),
        op=str(entry.get("profiling_name", "")).rpartition(":")[2],
        sizes=tuple(tuple(map(int, size)) for size in sizes),
        done=bool(entry.get("retired")) or entry.get("state") == "completed",
        created=int(entry.get("time_created_ns", 0)) * 1e-9,
        timeout=float(entry.get("timeout_ms", 0)) * 1e-3,
    )


def _progress(status: Mapping[Any, Any], name: str, own: list[Collective]) -> tuple[int, int]:
    """Numbers of the last collective that was issued, and of the last that is over: the later of what the status and
    the entries have. gloo's two threads write the status after they have let the loop go on, and the older collective's
    thread may come last: for as long as nothing follows, the status then is one too low (in one of twenty standstills
    on two busy cores). Each entry is marked by itself."""
    said = status.get(name) or status.get(int(name) if name.isdigit() else name) or {}
    enqueued = max((each.seq for each in own), default=0)
    completed = max((each.seq for each in own if each.done), default=0)
    return (
        max(enqueued, int(said.get("last_enqueued_collective", -1))),
        max(completed, int(said.get("last_completed_collective", -1))),
    )


def _ranks(dump: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found = {}
    for key, config in (dump.get("pg_config") or {}).items():
        try:
            ranks = json.loads(str(config.get("ranks") or "[]"))
        except ValueError:
            continue
        if ranks:
            found[str(config.get("name") or key)] = tuple(map(int, ranks))
    return found
