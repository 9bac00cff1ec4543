"""What the daemons of a job's nodes send to each other, and how large it may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.errors import ProtocolError
from sentinel.wire.parts import Integer, Name, Ordinal, World

PROTOCOL = 1
"""Raised when a message changes its meaning. Daemons of different protocols do not hear each other, and say so."""
MESSAGE_BYTES = 256 * 1024
CASE_BYTES = 48 * 1024
"""One case, without what is large in it: stacks and the like stay on their node."""
SHOWN_MEMBERS = 64
TEXT = 4096

_RANKS = msgspec.Meta(max_length=4096)
_CASES = msgspec.Meta(max_length=1024)
_NODES = msgspec.Meta(max_length=4096)


class ClusterMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""

    protocol: int = PROTOCOL


class Pulse(ClusterMessage, frozen=True, kw_only=True):
    """Once a second from a node: that it is there, how far it is, and the number of its last event."""

    node: Ordinal
    incarnation: Integer
    """Rises with each start of the node's daemon."""
    hostname: Name
    attempt: Integer
    step: Integer
    ranks: Annotated[dict[Name, Integer], _RANKS] = {}
    """Rank -> the last step that it reported."""
    last: Integer = 0
    """Number of its last event."""
    epoch: Integer = 0
    """The highest of a coordinator that it heard."""
    leaving: bool = False
    """Its ranks are gone, and its daemon goes."""
    job: wire.JobReport | None = None
    """How the job stands there, which is the answer to an order; None: no supervisor says."""


class NodeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case of a node, as it is since event `number`."""

    number: Integer
    case: Case
    incident: Name = ""
    """Id of the job's incident that it is a member of, where the node knows it."""
    paged: bool = False
    """Whether the node told people by itself, cut off from the coordinator."""


class Events(ClusterMessage, frozen=True, kw_only=True):
    """All that changed on a node after event `after`, up to event `upto`. What changed twice is in it once."""

    node: Ordinal
    incarnation: Integer
    after: Integer
    upto: Integer
    cases: Annotated[tuple[NodeCase, ...], _CASES] = ()


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the coordinator knows it."""

    node: Ordinal
    hostname: Name
    incarnation: Integer
    applied: Integer
    """Number of the node's last event that is in the job's incidents."""
    state: Literal["alive", "silent", "left"]
    silent_seconds: float
    attempt: Integer
    step: Integer
    ranks: Annotated[dict[Name, Integer], _RANKS] = {}


class OpenIncident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident of the job that fires."""

    id: Name
    attempt: Integer
    alert: Name
    nodes: Annotated[tuple[Ordinal, ...], _NODES]


class Beat(ClusterMessage, frozen=True, kw_only=True):
    """Once a second from the coordinator: what it applied of each node's events, and what it knows of the job."""

    epoch: Integer
    """Rises with each start of the coordinator."""
    expected: World
    """Nodes of the job."""
    nodes: Annotated[tuple[NodeState, ...], _NODES]
    incidents: Annotated[tuple[OpenIncident, ...], _CASES] = ()
    leaving: bool = False
    """It goes: each node tells people by itself from now on."""
    order: wire.Order | None = None
    """What all nodes are to do."""


Sent = TypeVar("Sent", bound=ClusterMessage)


def encode(message: ClusterMessage) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes, kind: type[Sent]) -> Sent:
    """A message that is checked. Raises ProtocolError."""
    if len(payload) > MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes; {MESSAGE_BYTES} are the most")
    try:
        theirs = msgspec.msgpack.decode(payload, type=ClusterMessage).protocol
        if theirs != PROTOCOL:
            raise ProtocolError(f"another node speaks protocol {theirs}, this one {PROTOCOL}; install one version")
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no {kind.__name__}: {error}") from None


def trim_case(case: Case) -> Case:
    """A copy that fits into `CASE_BYTES`: without stacks and the like, and in the end without signs and layers."""
    large: dict[str, Any] = {"stacks": {}, "census": {}, "out_of_memory": {}, "moments": {}, "provenance": {}}
    small = msgspec.structs.replace(
        case, members=case.members[:SHOWN_MEMBERS], summary=case.summary[:TEXT],
        done=tuple(text[:TEXT] for text in case.done[-4:]), **large,
    )  # fmt: skip
    if len(msgspec.msgpack.encode(small)) > CASE_BYTES:
        small = msgspec.structs.replace(small, signs=(), layers=(), members=small.members[:4])
    return small
