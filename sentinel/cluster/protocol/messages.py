"""What the daemons of a job's nodes send to each other, and how large it may be."""

from __future__ import annotations

import zlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.errors import ProtocolError
from sentinel.runs import RankState
from sentinel.wire.parts import Integer, Name, Ordinal, World

PROTOCOL = 1
"""Raised when a message changes its meaning. Daemons of different protocols do not hear each other, and say so."""
MESSAGE_BYTES = 256 * 1024
CASE_BYTES = 48 * 1024
"""One case, without what is large in it: stacks and the like stay on their node."""
SHOWN_MEMBERS = 64
TEXT = 4096
WORDS = 1000
"""Characters of a sentence in a field that is a `Name`, which has room for 1,024."""

MOST_NODES = 4096
"""Of a job."""

_RANKS = msgspec.Meta(max_length=4096)
_Number = Annotated[str, msgspec.Meta(max_length=8)]
"""Of a rank, as a key."""
_CASES = msgspec.Meta(max_length=1024)
_NODES = msgspec.Meta(max_length=MOST_NODES)
_SNAPSHOTS = msgspec.Meta(max_length=64)


class ClusterMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""

    most_bytes: ClassVar[int] = MESSAGE_BYTES
    """Before compression."""
    protocol: int = PROTOCOL


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollback of all ranks needs to know of one."""

    rank: Ordinal
    state: RankState
    over: bool = False
    """Its process ended."""
    last_seq: Integer
    version: Name = ""
    """Of its training-sentinel."""
    takes_stop: bool = False
    """It can leave at a step that is agreed on."""
    held: Annotated[tuple[Integer, ...], _SNAPSHOTS] = ()
    """Seqs of its newest snapshots."""
    terms: wire.RollbackTerms | None = None
    prepared: wire.Prepared | None = None
    """Its answer to the order that stands, and what came of it."""
    restored: wire.RolledBack | None = None


class NodeRollback(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's ranks stand towards a rollback or a stop of all, and what it asks for."""

    attempt: Integer
    step_offset: Integer
    step_seconds: float
    stage: Name = ""
    """The present stage, and its first step."""
    stage_seq: Integer = 0
    ranks: Annotated[tuple[RankReport, ...], _RANKS]
    cases: Annotated[tuple[Case, ...], _CASES] = ()
    """Those whose rule asks for a rollback, as far as a snapshot that is held may be of their steps."""
    asks: Annotated[tuple[Name, ...], _CASES] = ()
    """Ids of those for which one is wanted now."""
    followed: Annotated[tuple[Name, ...], _CASES] = ()
    """Ids of these for which all ranks are to leave where none goes back."""
    stops: Annotated[tuple[Case, ...], _CASES] = ()
    """Cases for which all ranks are to leave now."""
    withholds: bool = False
    """Whether it sees signs for which no snapshot is to be taken."""
    on_disk: Annotated[tuple[Integer, ...], _SNAPSHOTS] = ()
    """Steps of which it has a part on disk; and from which on it knows of enough that all nodes have, -1: it does not.
    """
    safe: Integer = -1


class CaseWords(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator does about a node's case that asked for a rollback or a stop."""

    node: Ordinal
    case: Name
    done: Annotated[tuple[Name, ...], _CASES]
    over: bool
    """It does nothing more about it."""
    stops: bool | None = None
    """Whether it asked for a stop. None: of an earlier version, which does not say."""


class RollbackOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemons of all nodes are to say to their ranks. Repeated with each beat, and said once."""

    attempt: Integer
    message: wire.Prepare | wire.Commit | wire.Abort | wire.Stop | None = None
    """The last one; None: nothing was said yet."""
    alert: Name = ""
    """Why, and the first step that showed it."""
    sign: Integer = -1
    words: Annotated[tuple[CaseWords, ...], _CASES] = ()
    withholding: Annotated[tuple[Ordinal, ...], _NODES] = ()
    """Nodes that see signs for which no rank is to take a snapshot."""
    on_all: Annotated[tuple[Integer, ...], _SNAPSHOTS] = ()
    """Steps whose snapshot all nodes have on disk; and before which none is needed, -1: that is not known."""
    floor: Integer = -1


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of other nodes may be waiting for: one that does what takes long with reason."""

    seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Since a rank of the node was last seen at work; None: none is."""
    patience: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds without progress that one of its ranks is granted for what it does, and those who wait for it."""


class Pulse(ClusterMessage, frozen=True, kw_only=True):
    """Once a second from a node: that it is there, how far it is, and the number of its last event."""

    node: Ordinal
    incarnation: Integer
    """Rises with each start of the node's daemon."""
    hostname: Name
    attempt: Integer
    step: Integer
    ranks: Annotated[dict[_Number, Integer], _RANKS] = {}
    """Rank -> the last step that it reported."""
    last: Integer = 0
    """Number of its last event."""
    epoch: Integer = 0
    stamp: float = 0.0
    """Of the last beat that it followed; see `election`."""
    leaving: bool = False
    """Its daemon goes."""
    ended: bool = False
    """And no rank is left there, nor a supervisor that would start one: no later daemon of the node follows another
    coordinator. Earlier versions do not say."""
    job: wire.JobReport | None = None
    """How the job stands there, which is the answer to an order; None: no supervisor says."""
    last_job: wire.JobReport | None = None
    """Where none says any more, what was said last: what was agreed to then still binds the node."""
    rollback: NodeRollback | None = None
    work: WorkReport = WorkReport()


class NodeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case of a node, as it is since event `number`."""

    number: Integer
    case: Case
    incident: Name = ""
    """Id of the job's incident that it is a member of, where the node knows it."""
    paged: bool = False
    """Whether the node told people by itself, cut off from the coordinator."""
    of_job: bool = False
    """It is an incident of the job, of which the node told people as its coordinator, and not that it is over."""


class Events(ClusterMessage, frozen=True, kw_only=True):
    """All that changed on a node after event `after`, up to event `upto`. What changed twice is in it once."""

    node: Ordinal
    incarnation: Integer
    after: Integer
    upto: Integer
    cases: Annotated[tuple[NodeCase, ...], _CASES] = ()


class Digest(ClusterMessage, frozen=True, kw_only=True):
    """Once a second from a node: what the rules of the job read of its steps after `after`, up to `upto`."""

    node: Ordinal
    attempt: Integer
    after: Integer
    upto: Integer
    body: bytes
    """`cluster/protocol/digest.py` has it."""


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
    ranks: Annotated[dict[_Number, Integer], _RANKS] = {}
    work: WorkReport = WorkReport()


class OpenIncident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident of the job that fires: what the next coordinator needs to know of its page."""

    id: Name
    attempt: Integer
    alert: Name
    nodes: Annotated[tuple[Ordinal, ...], _NODES]
    severity: Name = ""
    problem_id: Name = ""
    first_step: Integer = 0


class Beat(ClusterMessage, frozen=True, kw_only=True):
    """Once a second from the coordinator: what it applied of each node's events, and what it knows of the job."""

    most_bytes: ClassVar[int] = 16 * MESSAGE_BYTES
    """Some 200 for each node with eight ranks. Compressed they are a tenth."""
    node: Ordinal = 0
    """The coordinator's."""
    epoch: Integer
    """Each coordinator has another; see `election`."""
    stamp: float = 0.0
    """When it was sent, by the coordinator's clock."""
    acting: bool = False
    """Whether it counts on more than half of the nodes. Else it tells nobody and orders nothing."""
    expected: World
    """Nodes of the job."""
    members: wire.Members = wire.Members()
    """Which they are."""
    nodes: Annotated[tuple[NodeState, ...], _NODES]
    incidents: Annotated[tuple[OpenIncident, ...], _CASES] = ()
    leaving: bool = False
    """It goes: each node tells people by itself from now on."""
    order: wire.Order | None = None
    """What all nodes are to do."""
    rollback: RollbackOrder | None = None
    digested: Annotated[dict[Name, Integer], _NODES] = {}
    """Node -> the last step of its digests that need not be sent again."""
    blame: Annotated[dict[Name, Integer], _NODES] = {}
    """Node -> in how many incidents it was, of how many; see `blame`."""
    blamed_incidents: Integer = 0


Sent = TypeVar("Sent", bound=ClusterMessage)


def encode(message: ClusterMessage) -> bytes:
    """As bytes, compressed: most of a message are names that repeat."""
    return zlib.compress(msgspec.msgpack.encode(message))


def decode(payload: bytes, kind: type[Sent]) -> Sent:
    """A message that is checked. Raises ProtocolError."""
    try:
        stream = zlib.decompressobj()
        unpacked = stream.decompress(payload, kind.most_bytes)
        if not stream.eof:
            raise ProtocolError(f"a message of more than {kind.most_bytes} bytes, or a part of one")
        theirs = msgspec.msgpack.decode(unpacked, type=ClusterMessage).protocol
        if theirs != PROTOCOL:
            raise ProtocolError(f"another node speaks protocol {theirs}, this one {PROTOCOL}; install one version")
        return msgspec.msgpack.decode(unpacked, type=kind)
    except (zlib.error, msgspec.DecodeError) as error:
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


def shorten_case(case: Case) -> Case:
    """A copy with what a rollback is decided by, and no more."""
    return msgspec.structs.replace(
        trim_case(case), members=(), signs=(), layers=(), done=(), summary=case.summary[:500]
    )
