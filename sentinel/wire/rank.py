"""What a rank says."""

from __future__ import annotations

import functools
import time
from typing import Annotated, Any, Literal

import msgspec

from sentinel.wire.parts import PROTOCOL, Identity, Integer, Layer, Message, Name, RollbackTerms, RuleText

# Bounds on bulk data: each is several times what the largest runs send, and what a service can decode and examine in a
# tenth of a second, during which no other user is served.
STREAMS = msgspec.Meta(max_length=64)
LAYERS = msgspec.Meta(max_length=1 << 17)
COLUMNS = msgspec.Meta(max_length=2048)
"""`monitor.log` takes 1,024 names of the user's own."""
STATISTICS = msgspec.Meta(max_length=64)
BLOCKS = msgspec.Meta(max_length=4096)
SNAPSHOTS = msgspec.Meta(max_length=4096)
TIERS = msgspec.Meta(max_length=16)
Moment = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]
"""Unix seconds, up to the year 9999: what a history can be read with."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection, and again after each reconnect."""

    protocol: int = PROTOCOL
    version: str
    identity: Identity
    step_offset: Integer = 0
    next_seq: Integer = 0
    """The seq of the next step: tells a daemon that was restarted where the run is."""
    streams: Annotated[tuple[Name, ...], STREAMS] = ("optimizer",)
    facts: dict[str, Any] = {}
    """What the run is: model, parameters, optimizer, precision, loader, versions. Diagnosis uses them."""
    unseen: Annotated[tuple[str, ...], COLUMNS] = ()
    """What cannot be seen in this run, in words."""
    rollback: RollbackTerms | None = None
    snapshots: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()
    """Seqs of the snapshots that this rank holds."""
    promise: Integer = 0
    """Id of the `Prepare` whose verdict this rank waits for; 0: none. A daemon that knows nothing of it aborts it."""
    rules: tuple[RuleText, ...] = ()
    gpus: Annotated[tuple[Name, ...], STREAMS] = ()
    """UUIDs of the GPUs that this rank trains on, as CUDA has them: NVML puts `GPU-` or `MIG-` before them."""
    signals: Annotated[dict[Name, Name], COLUMNS] = {}
    """Signals that are not in `sentinel.signals`, and their scope: `monitor.log` and other packages' probes."""
    supervisor: str = ""
    """Mark of the `sentinel run` that started this process; empty: none did."""
    resumes: bool = False
    """Started again, the script goes on from what it saved: it has asked where."""
    ended: bool = False
    """The process ended before the daemon served: what follows was read from a file, and nothing gets an answer."""
    takes_closing: bool = False
    """Whether a `Closing` is understood: earlier versions would take it for damage."""
    takes_stop: bool = False
    """Whether a `Prepare` that stops is understood, and can be heeded."""
    writes_parts: bool = False
    """Whether a `Publish` to the ranks of one node of several is understood: earlier versions would wait for all."""
    stop_on: Annotated[tuple[Name, ...], COLUMNS] = ()
    """Alerts whose rules have the action `stop` in this run."""
    began: Moment = 0.0
    """Unix seconds of the attach; 0: an earlier version does not say."""


class LayerTable(Message, frozen=True, kw_only=True, tag="layer-table", dict=True):
    """Names what the positions in a `LayerBlock` mean. Sent when it changes, before the first block that uses it."""

    digest: Name
    """Hash of the content."""
    stream: Integer = 0
    layers: Annotated[tuple[Layer, ...], LAYERS]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the layers, in order."""
        return tuple([layer.name for layer in self.layers])

    @functools.cached_property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of some of them."""
        return any(layer.sharded for layer in self.layers)


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One signal over the rows of a batch."""

    values: bytes
    """float64, packed. NaN is a value; absence is a missing row."""
    rows: bytes = b""
    """uint16, packed, rising: the rows that have a value. Empty: all of them."""


class LayerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of all layers at one step."""

    seq: Integer
    table: Name
    """Digest of the layer table."""
    stats: Annotated[dict[Name, bytes], STATISTICS]
    """Signal -> float32, packed, one a layer."""
    layers: bytes = b""
    """uint32, packed: the layers that have a value. Empty: all of them."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank samples, and what it measured that all of it costs."""

    spacing: Annotated[dict[str, Integer], TIERS]
    """Tier -> every how many steps it is sampled."""
    wanted: Annotated[dict[str, Integer], TIERS]
    """What the rank would choose for itself: the daemon gives all ranks the coarsest."""
    costs: Annotated[dict[str, float], TIERS]
    """`hooks`, `sender`, `daemon` -> share of the loop's time. Empty until it was measured."""


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """The steps since the last batch, as columns."""

    stream: Integer = 0
    seqs: bytes
    """int64, packed, rising."""
    times: bytes
    """float64, packed: unix seconds at the exit of each step."""
    columns: Annotated[dict[Name, Column], COLUMNS] = {}
    layers: Annotated[tuple[LayerBlock, ...], BLOCKS] = ()
    dropped: Integer = 0
    """Steps dropped so far, because the queue was full or nothing read it."""
    skipped: Integer = 0
    """Samples left out so far, because the machine had no memory, descriptor or thread to spare."""
    pace: Pace | None = None
    """Where it changed since the last batch."""


class PhaseChanged(Message, frozen=True, kw_only=True, tag="phase"):
    """`monitor.phase`, or what the hooks know of it. The empty name is training."""

    name: Name
    seq: Integer
    time: float


class StageBegan(Message, frozen=True, kw_only=True, tag="stage"):
    """`monitor.stage`: from step `seq` on the task or the data are others, on purpose. Each rank says it."""

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
    """Answer to `Prepare`: bound to stop at its step, or not, and where this rank is."""

    id: Integer
    ok: bool
    seq: Integer
    reason: str = ""


class RolledBack(Message, frozen=True, kw_only=True, tag="rolled-back"):
    """Answer to `Commit`, sent once the restore was tried; of a stop, once all ranks agreed to leave, or did not."""

    id: Integer
    ok: bool
    to: Integer
    """The snapshot's seq."""
    at: Integer
    """The step at whose exit it was restored."""
    seconds: float
    reason: str = ""
    touched: bool = False
    """Not ok, and the state is neither what it was nor the snapshot's: nothing of it can be trusted."""
    flawed: bool = False
    """Not ok, since this rank's snapshot is unfit: an older one may do."""
    void: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """Answer to `Publish`: this rank's part is on disk, and from rank 0 that the whole is; or why not."""

    id: Integer
    ok: bool
    seq: Integer
    nbytes: Integer = 0
    """That this rank wrote."""
    seconds: float = 0.0
    reason: str = ""
    kept: Annotated[tuple[Integer, ...], SNAPSHOTS] = ()
    """Over several nodes, from the first rank of each: steps of which the node has a part on disk."""
    safe: Integer = -1
    """From this one on it knows of enough that all nodes hold; -1: it does not."""


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    """Answer to `Ask`."""

    id: Integer
    ok: bool
    content: dict[str, Any] = {}
    reason: str = ""


class Collected(Message, frozen=True, kw_only=True, tag="collected"):
    """Evidence of an incident, collected by the rank itself or because it was asked (`sentinel.wire.evidence`)."""

    what: str
    """`provenance` and so on."""
    seq: Integer
    """The step that it is of."""
    content: dict[str, Any]


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The rank is done: the process ends, or `detach`. Without it a lost connection is a lost rank."""

    reason: Literal["exit", "detach", "exception", "stopped"] = "exit"
    next_seq: Integer = 0
    detail: str = ""
    status: Integer = 0
    """Of `stopped`: the exit status that the process ends with. 0: not said."""
    time: Moment = msgspec.field(default_factory=time.time)
    """Unix seconds. An earlier version does not say: then it is when the message was read."""


class MeetingFound(Message, frozen=True, kw_only=True, tag="meeting-found"):
    """Answer to `FindMeeting`, and what is in the process group's store."""

    nodes: Integer = 0
    """Of the job, by rank 0."""
    address: Name = ""
    """`host:port`, where node 0's daemon listens; empty: it was not found."""
    second: Name = ""
    """`host:port`, where node 1's daemon listens and takes over; empty: it does not. Earlier versions do not read
    it."""
    secret: Name = ""
    """That everyone in the store's reach can read; empty: each node has one of its own."""
    reason: Name = ""
    """Why it was not found."""
