"""The messages that the daemons of a job's nodes send to each other, and how large they may be."""

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
"""Number of the protocol, raised when a message changes its meaning. Daemons of different protocols reject each other's
messages, and say so."""
MESSAGE_BYTES = 256 * 1024
CASE_BYTES = 48 * 1024
"""The most bytes of one case, without its large parts: stacks and the like stay on their node."""
SHOWN_MEMBERS = 64
LINES = 16
"""The most lines of evidence, and of what is missing, in the diagnosis of a case that is too large."""
TEXT = 4096
WORDS = 1000
"""The most characters of a sentence in a field that is a `Name`, which has room for 1,024."""

MOST_NODES = 4096
"""The most nodes of a job."""

_RANKS = msgspec.Meta(max_length=4096)
_Number = Annotated[str, msgspec.Meta(max_length=8)]
"""The number of a rank, as a key."""
_CASES = msgspec.Meta(max_length=1024)
_NODES = msgspec.Meta(max_length=MOST_NODES)
_CASES_OF_NODES = msgspec.Meta(max_length=4 * MOST_NODES)
"""An alert about the loss fires on all nodes, and others may fire beside it."""
_SNAPSHOTS = msgspec.Meta(max_length=64)


class ClusterMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""

    most_bytes: ClassVar[int] = MESSAGE_BYTES
    """The most bytes of the message, before compression."""
    protocol: int = PROTOCOL


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollback of all ranks needs to know about one rank."""

    rank: Ordinal
    state: RankState
    over: bool = False
    """Whether its process ended."""
    last_seq: Integer
    version: Name = ""
    """Version of its training-sentinel."""
    takes_stop: bool = False
    """Whether it can leave at an agreed step."""
    held: Annotated[tuple[Integer, ...], _SNAPSHOTS] = ()
    """Seqs of its newest snapshots."""
    terms: wire.RollbackTerms | None = None
    prepared: wire.Prepared | None = None
    """Its promise or refusal, the answer to the present order."""
    restored: wire.RolledBack | None = None
    """Its result of the present order: a restored snapshot, or why there is none."""


class NodeRollback(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node's ranks for a rollback or a stop of all ranks, and what the node asks for."""

    attempt: Integer
    step_offset: Integer
    step_seconds: float
    stage: Name = ""
    """Name of the present stage."""
    stage_seq: Integer = 0
    """First step of the present stage."""
    ranks: Annotated[tuple[RankReport, ...], _RANKS]
    cases: Annotated[tuple[Case, ...], _CASES] = ()
    """Cases whose rule asks for a rollback, as far as a held snapshot may be of their steps."""
    asks: Annotated[tuple[Name, ...], _CASES] = ()
    """Ids of the cases for which a rollback is wanted now."""
    followed: Annotated[tuple[Name, ...], _CASES] = ()
    """Ids of those among `asks` for which all ranks must leave if none is rolled back."""
    stops: Annotated[tuple[Case, ...], _CASES] = ()
    """Cases for which all ranks must leave now."""
    withholds: bool = False
    """Whether the node sees signs for which no snapshot may be taken."""
    on_disk: Annotated[tuple[Integer, ...], _SNAPSHOTS] = ()
    """Steps of which the node has a part on disk."""
    safe: Integer = -1
    """The step from which on the node knows of enough snapshots that all nodes have; -1: it does not."""


class CaseWords(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator does about a node's case that asked for a rollback or a stop."""

    node: Ordinal
    case: Name
    done: Annotated[tuple[Name, ...], _CASES]
    over: bool
    """Whether the coordinator does nothing more about the case."""
    stops: bool | None = None
    """Whether the case asked for a stop. None: the sender is an earlier version, which does not say."""


class RollbackOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemons of all nodes must send to their ranks. Repeated with each beat, but passed on only once."""

    attempt: Integer
    message: wire.Prepare | wire.Commit | wire.Abort | wire.Stop | None = None
    """The last message; None: there was none yet."""
    alert: Name = ""
    """The alert that is the reason."""
    sign: Integer = -1
    """The first step that showed the reason."""
    words: Annotated[tuple[CaseWords, ...], _CASES_OF_NODES] = ()
    withholding: Annotated[tuple[Ordinal, ...], _NODES] = ()
    """Nodes that see signs for which no rank may take a snapshot."""
    on_all: Annotated[tuple[Integer, ...], _SNAPSHOTS] = ()
    """Steps whose snapshot all nodes have on disk."""
    floor: Integer = -1
    """The step before which no snapshot is needed; -1: not known."""


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a node's rank for which other nodes' ranks may be waiting, as it takes long for a good reason."""

    seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds since a rank of the node was last seen at work; None: none is."""
    patience: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds without progress that one of its ranks is granted for its work, as are those that wait for it."""


class Pulse(ClusterMessage, frozen=True, kw_only=True):
    """Sent once a second by a node: that it is there, the step it has reached, and the number of its last event."""

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
    """Epoch of the last beat that it followed; see `election`."""
    stamp: float = 0.0
    """Stamp of the last beat that it followed."""
    leaving: bool = False
    """Whether its daemon is ending."""
    ended: bool = False
    """Whether, besides, no rank is left there, nor a supervisor that would start one: no later daemon of the node
    follows another coordinator. Earlier versions do not say."""
    job: wire.JobReport | None = None
    """The state of the job there, which is the answer to an order; None: no supervisor reports."""
    last_job: wire.JobReport | None = None
    """The last report, if no supervisor reports any more: what it agreed to still binds the node."""
    rollback: NodeRollback | None = None
    work: WorkReport = WorkReport()


class NodeCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case of a node, in its state since event `number`."""

    number: Integer
    case: Case
    incident: Name = ""
    """Id of the job's incident that the case is part of, if the node knows it."""
    paged: bool = False
    """Whether the node told people by itself, cut off from the coordinator."""
    of_job: bool = False
    """Whether it is an incident of the job: the node told people of it as the coordinator, but not that it is over."""


class Events(ClusterMessage, frozen=True, kw_only=True):
    """All changes on a node after event `after`, up to event `upto`. A case that changed twice is in it once."""

    node: Ordinal
    incarnation: Integer
    after: Integer
    upto: Integer
    cases: Annotated[tuple[NodeCase, ...], _CASES] = ()


class Digest(ClusterMessage, frozen=True, kw_only=True):
    """Sent once a second by a node: what the rules of the job read of its steps after `after`, up to `upto`."""

    node: Ordinal
    attempt: Integer
    after: Integer
    upto: Integer
    body: bytes
    """The packed steps; `cluster/protocol/digest.py` has the format."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the coordinator knows it."""

    node: Ordinal
    hostname: Name
    incarnation: Integer
    applied: Integer
    """Number of the node's last event that was applied to the job's incidents."""
    state: Literal["alive", "silent", "left"]
    silent_seconds: float
    attempt: Integer
    step: Integer
    ranks: Annotated[dict[_Number, Integer], _RANKS] = {}
    work: WorkReport = WorkReport()


class OpenIncident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident of the job that fires: what the next coordinator needs to know about its page."""

    id: Name
    attempt: Integer
    alert: Name
    nodes: Annotated[tuple[Ordinal, ...], _NODES]
    severity: Name = ""
    problem_id: Name = ""
    first_step: Integer = 0


class Beat(ClusterMessage, frozen=True, kw_only=True):
    """Sent once a second by the coordinator: which events of each node it applied, and what it knows of the job."""

    most_bytes: ClassVar[int] = 16 * MESSAGE_BYTES
    """The most bytes before compression: some 200 for each node with eight ranks. Compressed, they are a tenth."""
    node: Ordinal = 0
    """The coordinator's node."""
    epoch: Integer
    """The coordinator's epoch, which no other one has; see `election`."""
    stamp: float = 0.0
    """When it was sent, by the coordinator's clock."""
    acting: bool = False
    """Whether it counts on more than half of the nodes. Otherwise it sends no page and orders nothing."""
    expected: World
    """Number of nodes of the job."""
    members: wire.Members = wire.Members()
    """The nodes of the job."""
    nodes: Annotated[tuple[NodeState, ...], _NODES]
    incidents: Annotated[tuple[OpenIncident, ...], _CASES] = ()
    leaving: bool = False
    """Whether the coordinator is ending: each node tells people by itself from now on."""
    order: wire.Order | None = None
    """What all nodes must do; None: nothing."""
    rollback: RollbackOrder | None = None
    digested: Annotated[dict[Name, Integer], _NODES] = {}
    """Node -> the last step of its digests that need not be sent again."""
    blame: Annotated[dict[Name, Integer], _NODES] = {}
    """Node -> in how many incidents it was; see `blame`."""
    blamed_incidents: Integer = 0
    """The number of incidents that `blame` counts."""


Sent = TypeVar("Sent", bound=ClusterMessage)


def encode(message: ClusterMessage) -> bytes:
    """Return a message as compressed bytes: most of a message are names that repeat."""
    return zlib.compress(msgspec.msgpack.encode(message))


def decode(payload: bytes, kind: type[Sent]) -> Sent:
    """Return the checked message of these bytes. Raises ProtocolError."""
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
    """Return a copy that fits into `CASE_BYTES`: without stacks and the like; if need be, without signs and layers, and
    with less of the diagnosis. That may name all parameters of a model, or have a line for each node."""
    large: dict[str, Any] = {"stacks": {}, "census": {}, "out_of_memory": {}, "moments": {}, "provenance": {}}
    small = msgspec.structs.replace(
        case, members=case.members[:SHOWN_MEMBERS], summary=case.summary[:TEXT],
        done=tuple(text[:TEXT] for text in case.done[-4:]), **large,
    )  # fmt: skip
    if len(msgspec.msgpack.encode(small)) > CASE_BYTES:
        found = small.diagnosis
        found = msgspec.structs.replace(
            found, layers=(), missing=found.missing[:LINES], evidence=found.evidence[:LINES]
        )
        small = msgspec.structs.replace(small, signs=(), layers=(), members=small.members[:4], diagnosis=found)
    return small


def shorten_case(case: Case) -> Case:
    """Return a copy with only what a rollback's decision needs."""
    return msgspec.structs.replace(
        trim_case(case), members=(), signs=(), layers=(), done=(), summary=case.summary[:500],
        diagnosis=msgspec.structs.replace(case.diagnosis, layers=(), missing=(), evidence=()),
    )  # fmt: skip
