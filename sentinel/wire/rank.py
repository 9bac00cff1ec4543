"""Messages from a rank to the daemon."""

from __future__ import annotations

import functools
import time
from typing import Annotated, Any, Literal

import msgspec

from sentinel.wire.parts import PROTOCOL, Identity, Integer, Layer, Message, Name, RollbackTerms, RuleText

# Bounds on bulk data: each is several times what the largest runs send, and what a service can decode and examine in a
# tenth of a second, during which it serves no other user.
STREAMS = msgspec.Meta(max_length=64)
LAYERS = msgspec.Meta(max_length=1 << 17)
COLUMNS = msgspec.Meta(max_length=2048)
"""Columns of a batch, at most: `monitor.log` takes 1,024 names of the user's own."""
STATISTICS = msgspec.Meta(max_length=64)
BLOCKS = msgspec.Meta(max_length=4096)
SNAPSHOTS = msgspec.Meta(max_length=4096)
TIERS = msgspec.Meta(max_length=16)
Moment = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Unix seconds, up to the year 9999: the range in which a history can be read."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first message of a connection, sent again after each reconnect."""

    protocol: int = PROTOCOL
    version: str
    identity: Identity
    step_offset: Integer = 0
    next_seq: Integer = 0
    """The seq of the next step, from which a restarted daemon knows where the run is."""
    streams: Annotated[tuple[Name, ...], STREAMS] = ("optimizer",)
    facts: dict[str, Any] = {}
    """Facts about the run for the diagnosis: model, parameters, optimizer, precision, loader, versions."""
    unseen: Annotated[tuple[str, ...], COLUMNS] = ()
    """What the hooks cannot see in this run, in words."""
    rollback: RollbackTerms | None = None
    snapshots: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()
    """Seqs of the snapshots that this rank holds."""
    promise: Integer = 0
    """Id of the `Prepare` whose verdict this rank waits for; 0: none. A daemon that does not know this id aborts it."""
    rules: tuple[RuleText, ...] = ()
    gpus: Annotated[tuple[Name, ...], STREAMS] = ()
    """UUIDs of the GPUs that this rank trains on, as in CUDA: NVML puts `GPU-` or `MIG-` before them."""
    signals: Annotated[dict[Name, Name], COLUMNS] = {}
    """Signals that are not in `sentinel.signals`, with their scope: `monitor.log` and other packages' probes."""
    supervisor: str = ""
    """Mark of the `sentinel run` that started this process; empty: it was started otherwise."""
    resumes: bool = False
    """Whether the script goes on from what it saved when it is started again: it has asked where to go on."""
    ended: bool = False
    """Whether the process ended before the daemon served: what follows was read from a file, and nothing gets an
    answer."""
    takes_closing: bool = False
    """Whether the rank understands a `Closing`: earlier versions would take it for damage."""
    takes_stop: bool = False
    """Whether the rank understands a `Prepare` that stops the run, and can obey it."""
    writes_parts: bool = False
    """Whether the rank understands a `Publish` to the ranks of one node of several: earlier versions would wait for
    all."""
    stop_on: Annotated[tuple[Name, ...], COLUMNS] = ()
    """Alerts whose rules have the action `stop` in this run."""
    began: Moment = 0.0
    """Unix seconds of the attach; 0: an earlier version does not send it."""


class LayerTable(Message, frozen=True, kw_only=True, tag="layer-table", dict=True):
    """Gives the positions in a `LayerBlock` their meaning. Sent when it changes, before the first block that uses
    it."""

    digest: Name
    """Hash of the table's content."""
    stream: Integer = 0
    layers: Annotated[tuple[Layer, ...], LAYERS]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple([layer.name for layer in self.layers])

    @functools.cached_property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of some of the layers."""
        return any(layer.sharded for layer in self.layers)


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One signal over the rows of a batch."""

    values: bytes
    """float64, packed. NaN is a value; where a value is absent, its row is missing."""
    rows: bytes = b""
    """uint16, packed, rising: the rows that have a value. Empty: all rows."""


class LayerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of all layers at one step."""

    seq: Integer
    table: Name
    """Digest of the layer table."""
    stats: Annotated[dict[Name, bytes], STATISTICS]
    """Signal -> float32, packed, one per layer."""
    layers: bytes = b""
    """uint32, packed: the layers that have a value. Empty: all layers."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank samples, and the measured cost of all its sampling."""

    spacing: Annotated[dict[str, Integer], TIERS]
    """Tier -> its spacing in steps."""
    wanted: Annotated[dict[str, Integer], TIERS]
    """The spacings that the rank would choose for itself: the daemon sends all ranks the coarsest."""
    costs: Annotated[dict[str, float], TIERS]
    """`hooks`, `sender`, `daemon` -> share of the loop's time. Empty before the first measurement."""


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """The steps since the last batch, as columns."""

    stream: Integer = 0
    seqs: bytes
    """int64, packed, rising: the seqs of the steps."""
    times: bytes
    """float64, packed: unix seconds at the exit of each step."""
    columns: Annotated[dict[Name, Column], COLUMNS] = {}
    layers: Annotated[tuple[LayerBlock, ...], BLOCKS] = ()
    dropped: Integer = 0
    """Number of steps dropped so far, because the queue was full or no process read it."""
    skipped: Integer = 0
    """Number of samples left out so far, because the machine had no memory, descriptor or thread to spare."""
    pace: Pace | None = None
    """The new pace, if it changed since the last batch."""


class PhaseChanged(Message, frozen=True, kw_only=True, tag="phase"):
    """The start of a phase: `monitor.phase`, or what the hooks know of it. The empty name is training."""

    name: Name
    seq: Integer
    time: float


class StageBegan(Message, frozen=True, kw_only=True, tag="stage"):
    """`monitor.stage`: from step `seq` on the task or the data differ, on purpose. Each rank sends it."""

    name: Name
    seq: Integer
    time: float


class SnapshotTaken(Message, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot of the state at the exit of step `seq` is complete; `void` lists the snapshots it replaced."""

    seq: Integer
    nbytes: Integer
    seconds: float
    time: float
    void: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """Answer to `Prepare`: whether this rank is bound to stop at that step, and where it is."""

    id: Integer
    ok: bool
    seq: Integer
    reason: str = ""


class RolledBack(Message, frozen=True, kw_only=True, tag="rolled-back"):
    """Answer to `Commit`, sent after the restore was tried; for a stop, after all ranks agreed to leave, or did not."""

    id: Integer
    ok: bool
    to: Integer
    """The seq of the snapshot."""
    at: Integer
    """The seq of the step at whose exit it was restored."""
    seconds: float
    reason: str = ""
    touched: bool = False
    """Not ok, and the state is neither the old one nor the snapshot's: no part of it can be trusted."""
    flawed: bool = False
    """Not ok, as this rank's snapshot is unfit: an older snapshot may work."""
    void: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """Answer to `Publish`: this rank's part is on disk, or, from rank 0, the whole snapshot is; or why not."""

    id: Integer
    ok: bool
    seq: Integer
    nbytes: Integer = 0
    """Bytes that this rank wrote."""
    seconds: float = 0.0
    reason: str = ""
    kept: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()
    """Over several nodes, from the first rank of each: steps of which the node has a part on disk."""
    safe: Integer = -1
    """The step from which on it knows that all nodes hold enough snapshots; -1: it does not know."""


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    """Answer to `Ask`."""

    id: Integer
    ok: bool
    content: dict[str, Any] = {}
    reason: str = ""


class Collected(Message, frozen=True, kw_only=True, tag="collected"):
    """Evidence of an incident, which the rank collected by itself or on request (`sentinel.wire.evidence`)."""

    what: str
    """The kind of evidence: `provenance` and so on."""
    seq: Integer
    """The step that the evidence is from."""
    content: dict[str, Any]


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The rank is done: the process ends, or `detach`. Without a goodbye, a lost connection means a lost rank."""

    reason: Literal["exit", "detach", "exception", "stopped"] = "exit"
    next_seq: Integer = 0
    detail: str = ""
    status: Integer = 0
    """The exit status of the process, for the reason `stopped`. 0: not sent."""
    time: Moment = msgspec.field(default_factory=time.time)
    """Unix seconds. An earlier version does not send them: then it is the time at which the message was read."""


class MeetingFound(Message, frozen=True, kw_only=True, tag="meeting-found"):
    """Answer to `FindMeeting`, with what is in the process group's store."""

    nodes: Integer = 0
    """Number of nodes of the job, from rank 0."""
    address: Name = ""
    """`host:port` at which node 0's daemon listens; empty: it was not found."""
    second: Name = ""
    """`host:port` at which node 1's daemon listens and takes over; empty: it does not. Earlier versions do not read
    it."""
    secret: Name = ""
    """A secret that everyone with access to the store can read; empty: each node has one of its own."""
    reason: Name = ""
    """Why the meeting was not found."""
