"""Read torch's flight recorder: a rank's collectives and transfers, whichever way they were dumped.

torch numbers the collectives of each process group from 1 on every rank; equal numbers belong together. Transfers
(send, receive) are matched by their order between two ranks. A run stands still where ranks disagree.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp. NCCL has a ring of its own, the other backends have one
together, of 2,000 by default (TORCH_FR_BUFFER_SIZE). What is easy to get wrong:

- `pg_status` is keyed by `pg_id`, which numbers the groups of that process, and not by the group's name.
- Its numbers count transfers too, where a group has any (gloo counts all, NCCL writes the last one's own number).
- gloo records no transfer and no members, and marks what is over only as `retired`. NCCL retires what timed out, too.
- Entries of a coalesced batch share a number, and only the last of them, the batch's own, has a state.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

KEPT = 64
"""Collectives of a group that are kept: half of them from the first that is not over on, half of them the newest."""
GROUPS = 64
LANES = 256
BEFORE = 8
"""Completed collectives that are kept from before the first that is not completed."""
_TRANSFER = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")


class Collective(msgspec.Struct, frozen=True):
    """One collective, as one rank issued it; or one transfer."""

    group: str
    """Name of its process group."""
    seq: int
    """Its number in the group."""
    op: str
    """Name of the operation: `all_reduce`, `barrier` and so on."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Shapes of its inputs."""
    done: bool = False
    created: float = 0.0
    """Unix seconds at which it was created: the smaller, the earlier that rank issued it."""
    timeout: float = 0.0
    """Seconds after which the process group gives up."""
    started: bool = False
    """Whether the device had begun it. NCCL records that only with TORCH_NCCL_ENABLE_TIMING."""
    dtype: str = ""
    both: bool = False
    """Whether it has inputs and outputs: in a gather or scatter, only the root has both."""
    place: str = ""
    """`file:line in function` from which it was issued, where the dump has stacks."""

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
    """All collectives up to this number are over on this rank; the next one is not, if it was issued."""


class Lane(msgspec.Struct, frozen=True):
    """The transfers of a rank to or from another one in a group."""

    group: str
    peer: int
    sends: bool
    issued: int
    completed: int
    pending: Collective | None = None
    """The first that is not completed."""


class Flight(msgspec.Struct, frozen=True):
    """The last operations of one rank."""

    groups: dict[str, Group] = {}
    collectives: tuple[Collective, ...] = ()
    """The last collectives of each group, in rising order."""
    batches: int = -1
    """Batches that the loader gave since it last started over; -1: not known."""
    exhausted: bool = False
    """Whether the loader has given its last batch."""
    lanes: tuple[Lane, ...] = ()
    whole: bool = True
    """Whether the ring still has everything since the process began."""
    gloo: bool = False
    """Whether a gloo backend was recorded, which records no transfers."""

    def find_issued(self, group: str, seq: int) -> Collective | None:
        """Return what the rank issued under this number; None where it issued nothing, or the record is gone."""
        return next((each for each in self.collectives if (each.group, each.seq) == (group, seq)), None)


def flight_of(dump: Mapping[str, Any], members: Mapping[str, Iterable[int]] | None = None) -> Flight:
    """Read a dump: a dict of `entries`, `pg_config` and `pg_status`, as JSON and pickle have it. `members`: name of a
    group -> its ranks, where the dump does not say. Raises ValueError where it is no such dump."""
    # In JSON, an empty ring has no `entries`: for example, the general recorder of a job whose only backend is NCCL.
    entries = dump.get("entries", [] if "version" in dump else None)
    if not isinstance(entries, list):
        raise ValueError("a flight recorder's dump has `entries`")
    config = _read_config(dump)
    ranks = {name: tuple(map(int, each)) for name, each in (members or {}).items()} or {
        name: each for name, (_, each) in config.items() if each
    }
    found: dict[str, dict[int, Collective]] = defaultdict(dict)
    transfers: dict[str, list[tuple[str, Collective]]] = defaultdict(list)
    names: dict[str, str] = {}
    descriptions = {name: description for name, (description, _) in config.items()}
    uneven = set[str]()
    for entry in entries:
        name, descriptions[name] = _read_group(entry)
        names.setdefault(str(entry.get("pg_id", "")), name)
        one = _read_collective(name, entry)
        if entry.get("is_p2p"):
            transfers[name].append((str(entry.get("profiling_name", "")), one))
            uneven.add(name)
        else:
            earlier = found[name].get(one.seq)
            found[name][one.seq] = one if earlier is None else _join(earlier, one)
            if int(entry.get("op_id", one.seq)) != one.seq and earlier is None:
                uneven.add(name)
    status = _read_status(dump.get("pg_status") or {}, names, config)
    groups, newest = {}, []
    last = {name: max(each.created for each in own.values()) for name, own in found.items()}
    names_found = found.keys() | status.keys() | transfers.keys()
    for name in sorted(names_found, key=lambda each: (-last.get(each, 0.0), each))[:GROUPS]:
        own = [found[name][seq] for seq in sorted(found.get(name, ()))]
        enqueued, completed = _count(own, status.get(name) if name not in uneven else None)
        newest += _keep(own, completed)
        groups[name] = Group(name, descriptions.get(name, ""), ranks.get(name, ()), enqueued, completed)
    lanes = [lane for name, own in transfers.items() for lane in _read_lanes(own, ranks.get(name), descriptions[name])]
    return Flight(
        groups,
        tuple(newest),
        lanes=tuple(lanes[:LANES]),
        whole=not entries or int(entries[0].get("record_id", 0)) == 0,
        gloo=any(map(_is_gloo, entries)),
    )


def merge_flights(flights: Sequence[Flight]) -> Flight:
    """Merge the dumps of one rank's several recorders into one; a group is taken from the first dump that has it."""
    groups: dict[str, Group] = {}
    collectives: list[Collective] = []
    for each in flights:
        collectives += [one for one in each.collectives if one.group not in groups]
        groups = each.groups | groups
    return Flight(
        groups,
        tuple(collectives),
        lanes=tuple(lane for each in flights for lane in each.lanes),
        whole=all(each.whole for each in flights),
        gloo=any(each.gloo for each in flights),
    )


def _read_group(entry: Mapping[str, Any]) -> tuple[str, str]:
    named = entry.get("process_group") or (str(entry.get("pg_id", "")), "")
    return str(named[0]), str(named[1])


def _is_gloo(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("profiling_name", "")).startswith("gloo:")


def _read_collective(group: str, entry: Mapping[str, Any]) -> Collective:
    sizes = entry.get("input_sizes") or ()
    dtypes = entry.get("input_dtypes") or ()
    return Collective(
        group=group,
        seq=int(entry.get("collective_seq_id", 0)) if not entry.get("is_p2p") else int(entry.get("p2p_seq_id", 0)),
        op=str(entry.get("profiling_name", "")).rpartition(":")[2],
        sizes=tuple(tuple(map(int, size)) for size in sizes),
        done=entry.get("state") == "completed" or bool(entry.get("retired") and _is_gloo(entry)),
        created=int(entry.get("time_created_ns", 0)) * 1e-9,
        timeout=float(entry.get("timeout_ms", 0)) * 1e-3,
        started=entry.get("state") == "started",
        dtype=str(dtypes[0]) if dtypes else "",
        both=all(any(0 not in size for size in each) for each in (sizes, entry.get("output_sizes") or ())),
        place=_find_place(entry.get("frames") or ()),
    )


def _find_place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost frame that is not torch's own."""
    for frame in frames[:64]:
        file = str(frame.get("filename", ""))
        if "/torch/" not in file and file.endswith(".py"):
            return f"{file}:{frame.get('line', '')} in {frame.get('name', '')}"
    return ""


def _join(earlier: Collective, later: Collective) -> Collective:
    """Join two entries with the same number: a coalesced batch, of which the later entry knows the state."""
    return msgspec.structs.replace(
        earlier, sizes=earlier.sizes + later.sizes, done=later.done, started=later.started, both=False
    )


def _count(own: list[Collective], status: tuple[int, int] | None) -> tuple[int, int]:
    """Return the numbers of the last collective that was issued, and of the last before the first that is not over.

    Each entry is marked by itself, and the status may be one too low: gloo's two threads write it after they have let
    the loop go on (in one of twenty standstills on two busy cores). The status is needed for what the ring no longer
    has: entries are overwritten from the oldest on, so where an entry is left that is over, all before it were over.
    """
    enqueued, completed = status or (-1, -1)
    enqueued = max(enqueued, max((each.seq for each in own), default=0))
    first = next((each.seq for each in own if not each.done), None)
    over = [each.seq for each in own if each.done]
    if first is None:
        return enqueued, max(completed, max(over, default=0))
    if status is not None and not over and completed >= 0:
        first = min(first, completed + 1)
    return enqueued, first - 1


def _keep(own: list[Collective], completed: int) -> list[Collective]:
    first = next((index for index, each in enumerate(own) if each.seq > completed), len(own))
    if len(own) - first <= KEPT - BEFORE:
        return own[-KEPT:]
    begin = max(first - BEFORE, 0)
    return own[begin : begin + KEPT // 2] + own[-KEPT // 2 :]


def _read_config(dump: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> description, members."""
    found = {}
    for key, config in (dump.get("pg_config") or {}).items():
        try:
            ranks = json.loads(str(config.get("ranks") or "[]"))
        except ValueError:
            continue
        if ranks:
            found[str(config.get("name") or key)] = str(config.get("desc", "")), tuple(map(int, ranks))
    return found


def _read_status(
    status: Mapping[Any, Any], names: Mapping[str, str], config: Mapping[str, Any]
) -> dict[str, tuple[int, int]]:
    """Return name -> numbers of the last collective that was issued and of the last that is over. The entries tell
    which name belongs to an id; where all of them are overwritten, the order counts, as groups were numbered when they
    were made."""
    counts = {
        str(key): (
            int(each.get("last_enqueued_collective", -1)),
            int(each.get("last_completed_collective", -1)),
        )
        for key, each in status.items()
    }
    known = {key: name for key, name in names.items() if key in counts}
    if len(known) < len(counts) == len(config) and all(each.isdigit() for each in (*counts, *config)):
        made = dict(zip(sorted(counts, key=int), sorted(config, key=int), strict=True))
        if known and all(made[key] == name for key, name in known.items()):
            known = made
    return {name: counts[key] for key, name in known.items()}


def _read_lanes(own: list[tuple[str, Collective]], ranks: tuple[int, ...] | None, description: str) -> list[Lane]:
    batches = {one.seq: one for name, one in own if name.endswith(":coalesced")}
    lanes: dict[tuple[int, bool], list[Collective]] = defaultdict(list)
    for name, one in own:
        if (match := _TRANSFER.search(name)) is None:
            continue
        peer = int(match[3])
        if ranks is not None:
            peer = ranks[peer] if peer < len(ranks) else -1
        elif description != "default_pg":
            peer = -1
        if peer >= 0:
            batch = batches.get(one.seq)
            done = batch.done if batch is not None else one.done
            created = batch.created if batch is not None else one.created
            lanes[peer, match[1] == "send"].append(
                msgspec.structs.replace(one, op=match[1], done=done, created=created, both=False)
            )
    return [
        Lane(
            ones[0].group,
            peer,
            sends,
            len(ones),
            sum(each.done for each in ones),
            next((each for each in ones if not each.done), None),
        )
        for (peer, sends), ones in lanes.items()
    ]
