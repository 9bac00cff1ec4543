"""Questions between a job's nodes on demand, and their answers: incidents, whole cases, where ranks stand.

A question is answered at once, or not at all: it keeps no state and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from sentinel import wire
from sentinel.cluster.protocol.messages import MESSAGE_BYTES, ClusterMessage, encode, trim_case
from sentinel.diagnose.case import BY_RANK, Case
from sentinel.diagnose.standstill.stacks import training
from sentinel.runs import Rank, RankState
from sentinel.wire.flight_recorder import Flight
from sentinel.wire.heartbeat_page import Heartbeat, Stall
from sentinel.wire.parts import Integer, Name, Ordinal

STACK_CHARACTERS = 16 * 1024
"""The most characters of the training thread's stack."""
PARTS = 64
"""The most messages of one answer: what does not fit is left out, and counted in `NodeAnswer.left_out`."""
_HEAD_BYTES = 4096
_ITEM_BYTES = MESSAGE_BYTES - _HEAD_BYTES
_ITEMS = msgspec.Meta(max_length=4096)
_Stack = Annotated[str, msgspec.Meta(max_length=STACK_CHARACTERS)]


class Question(ClusterMessage, frozen=True, kw_only=True):
    """What one node asks another."""

    what: Literal["incidents", "cases", "ranks"]
    """`incidents` of the job, from the coordinator; `cases` of a node, whole; where its `ranks` stand."""
    ids: Annotated[tuple[Name, ...], _ITEMS] = ()
    """Ids of incidents or cases; empty: all incidents."""


class IncidentView(msgspec.Struct, frozen=True, kw_only=True):
    """An incident of the job, and the nodes' cases that it is made of."""

    case: Case
    sources: Annotated[tuple[tuple[Ordinal, Name], ...], _ITEMS]
    """The cases that it is made of: (node, id of its case)."""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands, as far as the analysis of a hang needs to know."""

    identity: wire.Identity
    state: RankState
    phase: Name
    last_seq: Integer
    step_offset: Integer
    stall: Stall
    heartbeat: Heartbeat | None
    stack: _Stack
    """The training thread's stack; empty: the rank gave none."""
    flight: Flight | None


class NodeAnswer(ClusterMessage, frozen=True, kw_only=True):
    """An answer, or a part of it."""

    node: Ordinal
    attempt: Integer
    incidents: Annotated[tuple[IncidentView, ...], _ITEMS] = ()
    cases: Annotated[tuple[Case, ...], _ITEMS] = ()
    ranks: Annotated[tuple[RankView, ...], _ITEMS] = ()
    left_out: Integer = 0
    """How many items did not fit."""


def view_rank(rank: Rank) -> RankView:
    """Return a rank for other nodes; with too many collectives, only the open ones and the last before them."""
    ident = rank.heartbeat.ident if rank.heartbeat is not None else 0
    view = RankView(
        identity=rank.identity,
        state=rank.state,
        phase=rank.phase,
        last_seq=rank.last_seq,
        step_offset=rank.hello.step_offset,
        stall=rank.stall,
        heartbeat=rank.heartbeat,
        stack=str(training(rank.dump, ident) or "")[:STACK_CHARACTERS],
        flight=rank.flight,
    )
    flight = view.flight
    if flight is not None and _count_bytes(view) > _ITEM_BYTES:
        done = {name: group.completed for name, group in flight.groups.items()}
        kept = tuple(one for one in flight.collectives if one.seq >= done.get(one.group, 0))
        view = msgspec.structs.replace(view, flight=msgspec.structs.replace(flight, collectives=kept))
    return view if _count_bytes(view) <= _ITEM_BYTES else msgspec.structs.replace(view, flight=None)


def restore_rank(view: RankView) -> Rank:
    """Return the rank that another node described, for the analysis of a hang."""
    rank = Rank(
        wire.Hello(version="", identity=view.identity, step_offset=view.step_offset, next_seq=view.last_seq + 1), 0.0
    )
    rank.state, rank.phase, rank.stall, rank.heartbeat = view.state, view.phase, view.stall, view.heartbeat
    rank.dump, rank.flight = view.stack, view.flight
    return rank


def view_case(case: Case) -> Case:
    """Return a case with its evidence; if too large for one message, with shorter stacks or, if need be, without."""
    if _count_bytes(case) <= _ITEM_BYTES:
        return case
    room = _ITEM_BYTES // 8 // max(len(case.stacks), 1)
    shorter = msgspec.structs.replace(case, stacks={rank: stack[:room] for rank, stack in case.stacks.items()})
    return shorter if _count_bytes(shorter) <= _ITEM_BYTES else trim_case(case)


def add_details(incident: Case, cases: Sequence[Case]) -> Case:
    """Return the job's incident with the evidence of each of its cases from the nodes."""
    found: dict[str, dict[str, Any]] = {name: {} for name in BY_RANK}
    for case in cases:
        for name, evidence in found.items():
            evidence |= getattr(case, name)
    return msgspec.structs.replace(incident, **found)


def pack_answer(answer: NodeAnswer) -> list[bytes]:
    """Return an answer as messages that each fit the limit. There is always at least one, to show that the node
    answered."""
    parts: list[dict[str, list[Any]]] = [{}]
    room, left_out = _ITEM_BYTES, 0
    items: Iterable[tuple[str, Any]] = (
        (name, item) for name in ("incidents", "cases", "ranks") for item in getattr(answer, name)
    )
    for name, item in items:
        size = _count_bytes(item)
        if size > room and len(parts) < PARTS and parts[-1]:
            parts.append({})
            room = _ITEM_BYTES
        if size > room:
            left_out += 1
            continue
        parts[-1].setdefault(name, []).append(item)
        room -= size
    empty = msgspec.structs.replace(answer, incidents=(), cases=(), ranks=(), left_out=left_out)
    return [
        encode(msgspec.structs.replace(empty, **{name: tuple(some) for name, some in part.items()})) for part in parts
    ]


def _count_bytes(item: object) -> int:
    return len(msgspec.msgpack.encode(item))
