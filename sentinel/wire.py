"""Messages between a rank, the daemon and the command line, and their framing.

A frame is a 4-byte big-endian length and one msgpack map whose `type` names the message. msgpack and not JSON,
because JSON has no NaN. Maps and not arrays, because a daemon must be able to read the `protocol` of a hello
from another version, and unknown fields are ignored, so that fields can be added. Numbers in bulk travel as
packed little-endian arrays inside `bytes`: 0.3 us a batch instead of 17.

A rank is keyed (attempt, rank), a sample (attempt, seq, rank):

    run      name + unique id; the ranks of one job share it
    attempt  restart count of the scheduler or torchrun; a script started by hand again is a new run
    seq      ordinal, from 0, of the attempted optimizer steps of the first optimizer. Never rewinds; a step that
             the loss scaler skips counts. What people are shown is `seq + Hello.step_offset`
    stream   0 for the first optimizer; others have series, and a seq, of their own
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args

import msgspec

from sentinel.errors import ProtocolError

PROTOCOL = 1
"""Raised when a message changes its meaning. Peers of different protocols refuse each other, in words."""

FRAME_LIMIT = 16 * 1024 * 1024
"""Bytes. A layer block of 100,000 parameters x 8 statistics is 3 MB."""

_LENGTH = struct.Struct(">I")
T = TypeVar("T")


class Message(msgspec.Struct, tag_field="type", frozen=True, kw_only=True):
    """Base of all messages."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is."""

    run: str
    """Name of the run, for people."""
    run_id: str
    """Unique id of the run, equal on all its ranks and attempts. Letters, digits, `-`, `_`; at most 40."""
    attempt: int = 0
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    hostname: str = ""
    pid: int = 0
    session: str = ""
    """Unique to one `attach`: a notebook cell that runs again is another session of the same process."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter tensor."""

    name: str
    """Qualified name, `module.` and `_orig_mod.` stripped."""
    model: str = ""
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    tied_to: str = ""
    """Name of the first parameter that shares this storage."""
    placement: tuple[str, ...] = ()
    """A mesh dimension each: `shard(0)`, `replicate`, `partial`. Empty: a plain tensor, the same on every rank."""
    mesh: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of it."""
        return any(p.startswith("shard") for p in self.placement)

    @property
    def part(self) -> tuple[int, ...]:
        """Coordinates along the dimensions of the mesh that shard it: ranks that have the same hold the same part."""
        return self._along(shards=True)

    @property
    def replica(self) -> int:
        """0 on one of the ranks that hold the same part: what is added up over ranks is taken from that one."""
        return max(self._along(shards=False), default=0)

    def _along(self, *, shards: bool) -> tuple[int, ...]:
        pairs = zip(self.placement, self.coordinates, strict=False)  # a rank outside the mesh has no coordinates
        return tuple([at for placement, at in pairs if placement.startswith("shard") is shards])


class RollbackTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the user armed, as the daemon needs to know it."""

    every: int
    keep: int
    margin: int
    budget: int
    skip_batches: int = 0
    lr_factor: float = 1.0
    disk_every: int = 0
    """How many times `every` lie between two snapshots on disk; 0: none are written."""


class RuleText(msgspec.Struct, frozen=True, kw_only=True):
    """A rule file that a run brings."""

    file: str
    text: str


# From a rank.


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection, and again after each reconnect."""

    protocol: int = PROTOCOL
    version: str
    identity: Identity
    step_offset: int = 0
    next_seq: int = 0
    """The seq of the next step: tells a daemon that was restarted where the run is."""
    streams: tuple[str, ...] = ("optimizer",)
    facts: dict[str, Any] = {}
    """What the run is: model, parameters, optimizer, precision, loader, versions. Diagnosis uses them."""
    unseen: tuple[str, ...] = ()
    """What cannot be seen in this run, in words."""
    rollback: RollbackTerms | None = None
    snapshots: tuple[int, ...] = ()
    """Seqs of the snapshots that this rank holds."""
    promise: int = 0
    """Id of the `Prepare` whose verdict this rank waits for; 0: none. A daemon that knows nothing of it aborts it."""
    rules: tuple[RuleText, ...] = ()
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that this rank trains on, as CUDA has them: NVML puts `GPU-` or `MIG-` before them."""
    signals: dict[str, str] = {}
    """Signals that are not in `sentinel.signals`, and their scope: `monitor.log` and other packages' probes."""
    supervisor: str = ""
    """Mark of the `sentinel run` that started this process; empty: none did."""
    resumes: bool = False
    """Started again, the script goes on from what it saved: it has asked where."""


class LayerTable(Message, frozen=True, kw_only=True, tag="layer-table"):
    """Names what the positions in a `LayerBlock` mean. Sent when it changes, before the first block that uses it."""

    digest: str
    """Hash of the content."""
    stream: int = 0
    layers: tuple[Layer, ...]


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One signal over the rows of a batch."""

    values: bytes
    """float64, packed. NaN is a value; absence is a missing row."""
    rows: bytes = b""
    """uint16, packed: the rows that have a value. Empty: all of them."""


class LayerBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of all layers at one step."""

    seq: int
    table: str
    """Digest of the layer table."""
    stats: dict[str, bytes]
    """Signal -> float32, packed, one a layer."""
    layers: bytes = b""
    """uint32, packed: the layers that have a value. Empty: all of them."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often a rank samples, and what it measured that all of it costs."""

    spacing: dict[str, int]
    """Tier -> every how many steps it is sampled."""
    wanted: dict[str, int]
    """What the rank would choose for itself: the daemon gives all ranks the coarsest."""
    costs: dict[str, float]
    """`hooks`, `sender`, `daemon` -> share of the loop's time. Empty until it was measured."""


class Batch(Message, frozen=True, kw_only=True, tag="batch"):
    """The steps since the last batch, as columns."""

    stream: int = 0
    seqs: bytes
    """int64, packed, rising."""
    times: bytes
    """float64, packed: unix seconds at the exit of each step."""
    columns: dict[str, Column] = {}
    layers: tuple[LayerBlock, ...] = ()
    dropped: int = 0
    """Steps dropped so far, because the queue was full or nobody read."""
    pace: Pace | None = None
    """Where it changed since the last batch."""


class PhaseChanged(Message, frozen=True, kw_only=True, tag="phase"):
    """`monitor.phase`, or what the hooks know of it. The empty name is training."""

    name: str
    seq: int
    time: float


class SnapshotTaken(Message, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot of the state at the exit of step `seq` is complete; `void` lists those that it replaced."""

    seq: int
    nbytes: int
    seconds: float
    time: float
    void: tuple[int, ...] = ()


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """Answer to `Prepare`: bound to stop at its step, or not, and where this rank is."""

    id: int
    ok: bool
    seq: int
    reason: str = ""


class RolledBack(Message, frozen=True, kw_only=True, tag="rolled-back"):
    """Answer to `Commit`, sent once the restore was tried."""

    id: int
    ok: bool
    to: int
    """The snapshot's seq."""
    at: int
    """The step at whose exit it was restored."""
    seconds: float
    reason: str = ""
    touched: bool = False
    """Not ok, and the state is neither what it was nor the snapshot's: nothing of it can be trusted."""
    flawed: bool = False
    """Not ok, since this rank's snapshot is unfit: an older one may do."""
    void: tuple[int, ...] = ()


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """Answer to `Publish`: this rank's part is on disk, and from rank 0 that the whole is; or why not."""

    id: int
    ok: bool
    seq: int
    nbytes: int = 0
    """That this rank wrote."""
    seconds: float = 0.0
    reason: str = ""


class Reply(Message, frozen=True, kw_only=True, tag="reply"):
    """Answer to `Ask`."""

    id: int
    ok: bool
    content: dict[str, Any] = {}
    reason: str = ""


class Collected(Message, frozen=True, kw_only=True, tag="collected"):
    """Evidence of an incident, collected by the rank itself or because it was asked (`sentinel.collected`)."""

    what: str
    """`provenance` and so on."""
    seq: int
    """The step that it is of."""
    content: dict[str, Any]


class Goodbye(Message, frozen=True, kw_only=True, tag="goodbye"):
    """The rank is done: the process ends, or `detach`. Without it a lost connection is a lost rank."""

    reason: Literal["exit", "detach", "exception", "stopped"] = "exit"
    next_seq: int = 0
    detail: str = ""


# To a rank.


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The hello fits."""

    protocol: int = PROTOCOL
    version: str
    page: str = ""
    """Address for people, where one is served."""
    notes: tuple[str, ...] = ()
    keeps: bool = False
    """`Kept` will follow: the rank holds on to what it sent until then, for the daemon that comes after this one."""
    signals: bool = True
    """The daemon can signal this process, and so have its stacks dumped at any time."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The hello does not fit. The rank prints the reason once and stays away."""

    protocol: int = PROTOCOL
    reason: str


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """Text for the training terminal; rank 0 gets it. `alert` is what `monitor.on_alert` hands to the user.

    Either may be empty: a line that is no alert, an alert of which the terminal is not told."""

    id: str = ""
    """What was shown under this id is not shown again: a daemon that was restarted cannot know. Empty: always shown."""
    text: str
    alert: dict[str, Any] = {}


class Kept(Message, frozen=True, kw_only=True, tag="kept"):
    """What came in the first `frames` frames of this connection is in the history, and will not be asked for again."""

    frames: int


class Attend(Message, frozen=True, kw_only=True, tag="attend"):
    """Something looks odd: sample tiers 1 and 2 at every step for `steps` steps."""

    steps: int


class DaemonCost(Message, frozen=True, kw_only=True, tag="daemon-cost"):
    """What the daemon itself costs: it counts against the budget of the rank's governor."""

    share: float
    """CPU seconds a second that it uses for this rank."""


class Spacing(Message, frozen=True, kw_only=True, tag="spacing"):
    """One spacing for all ranks, from step `at` on. Powers of two, by tier."""

    at: int
    tiers: dict[str, int]


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Promise to stop at the exit of step `at` and wait for the verdict; `to` is the snapshot meant."""

    id: int
    at: int
    to: int


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """All ranks promised: restore."""

    id: int
    skip_batches: int = 0
    lr_factor: float = 1.0


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Not all ranks promised: go on as if nothing had been asked."""

    id: int
    reason: str = ""


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """End the run at the exit of the next step, in these words. Sent only where the user armed a rollback."""

    reason: str


class Held(Message, frozen=True, kw_only=True, tag="held"):
    """Every rank holds the snapshot of `seq`: of more use than one that others lack. Sent to runs of several ranks."""

    seq: int


class Publish(Message, frozen=True, kw_only=True, tag="publish"):
    """The snapshot of `seq` is good, and every rank holds it: write it to disk, in the background."""

    id: int
    seq: int
    step: int
    """The user's number of it."""
    run: str
    run_id: str
    attempt: int


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """On-demand evidence: stacks, a census, a provenance run."""

    id: int
    what: str
    arguments: dict[str, Any] = {}


# Between the command line and the daemon.


class Query(Message, frozen=True, kw_only=True, tag="query"):
    """What the command line asks of a live daemon."""

    protocol: int = PROTOCOL
    what: str
    arguments: dict[str, Any] = {}


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """And what it gets."""

    ok: bool
    content: Any = None
    reason: str = ""


# Between `sentinel run` and the daemon.


class Supervise(Message, frozen=True, kw_only=True, tag="supervise"):
    """A supervisor asks to be told of its job, from now on."""

    protocol: int = PROTOCOL
    mark: str
    """What the job's ranks say in their hello."""
    always: bool = False
    """It ends the job where it must, also one that does not say that it can go on from what it saved."""


class Standing(Message, frozen=True, kw_only=True, tag="standing"):
    """How its job stands: when a supervisor asks, when the job is to be ended, and when its last rank has gone."""

    run: str
    run_id: str
    attempt: int
    step: int | None = None
    """The user's step that was reported last."""
    step_seconds: float = 0.1
    resumes: bool = False
    ends: bool = False
    """The evidence of `alert` is in: end the job."""
    over: bool = False
    """No rank is left: this is the last word."""
    alert: str = ""
    """What explains the end, if anything: the alert's name, its case and its cause."""
    case: str = ""
    cause: str = ""
    sign: int | None = None
    """The user's step from which on the weights may be harmed: first sign of what is open and asks for a rollback."""
    raised: str = ""
    """The exception that ended a rank."""
    stopped: str = ""
    """Why the run was stopped at the end of its rollbacks."""


FromRank = (
    Hello | LayerTable | Batch | PhaseChanged | SnapshotTaken | Prepared | RolledBack | Published | Reply | Collected
    | Goodbye | Query | Supervise
)  # fmt: skip
ToRank = (
    Welcome
    | Refused
    | Notice
    | Kept
    | Attend
    | DaemonCost
    | Spacing
    | Prepare
    | Commit
    | Abort
    | Stop
    | Held
    | Publish
    | Ask
    | Answer
    | Standing
)

_ENCODER = msgspec.msgpack.Encoder()
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class _Typed(msgspec.Struct):
    type: str


_TYPES = frozenset(kind.__struct_config__.tag for kind in (*get_args(FromRank), *get_args(ToRank)))


class _Opening(msgspec.Struct):
    """As much of a first message as any version can read."""

    type: str
    protocol: int


def frame(message: Message) -> bytes:
    """Encode one message. Raises `ProtocolError` where it is over `FRAME_LIMIT`."""
    body = _ENCODER.encode(message)
    if len(body) > FRAME_LIMIT:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {FRAME_LIMIT}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into message bodies, whatever the chunks it arrives in."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield each complete body. Raises `ProtocolError` at a length over `FRAME_LIMIT`: it is no frame of ours."""
        self._pending += chunk
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > FRAME_LIMIT:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {FRAME_LIMIT}: not Sentinel's")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield body


def from_rank(body: bytes) -> FromRank:
    """Decode what a rank or the command line sent. Raises `ProtocolError`."""
    return _decode(_FROM_RANK, body)


def to_rank(body: bytes) -> ToRank:
    """Decode what the daemon sent. Raises `ProtocolError`."""
    return _decode(_TO_RANK, body)


def is_known(body: bytes) -> bool:
    """Whether this version has a message of that type. Another version of the same protocol may have more of them,
    which are passed over. Raises `ProtocolError` where it is no message at all."""
    try:
        return msgspec.msgpack.decode(body, type=_Typed).type in _TYPES
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer does not speak Sentinel's protocol: {error}") from None


def opening_protocol(body: bytes) -> int:
    """The protocol version that a first message claims, whatever else is in it. Raises `ProtocolError`."""
    try:
        return msgspec.msgpack.decode(body, type=_Opening).protocol
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer does not speak Sentinel's protocol: {error}") from None


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from None


def packed(typecode: Literal["d", "f", "q", "I", "H"], numbers: bytes) -> array[Any]:
    """Unpack a column. `typecode` as in the `array` module. Raises `ProtocolError` at a cut one."""
    values: array[Any] = array(typecode)
    try:
        values.frombytes(numbers)
    except ValueError:
        raise ProtocolError(f"a packed column of {len(numbers)} bytes is cut short") from None
    return values
