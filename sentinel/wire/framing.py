"""Encode and decode frames: a 4-byte big-endian length, and one msgpack map whose `type` names the message."""

from __future__ import annotations

import functools
import gc
import re
import struct
from array import array
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args

import msgspec

from sentinel.errors import ProtocolError
from sentinel.wire import command, daemon, rank
from sentinel.wire.parts import PROTOCOL, Message

FRAME_LIMIT = 16 * 1024 * 1024
"""Bytes of a message, at most. A layer block of 100,000 parameters x 8 statistics is 3 MB."""
PLAIN_LIMIT = 1024 * 1024
"""Bytes of a rank's message, at most, unless it is a batch or a layer table: the content of the others has no fixed
type."""
CONTAINERS = 200_000
"""Maps and lists in such a message, at most. An empty one takes a byte: a million of them took 0.1 s to decode."""
_CONTAINER = bytes(range(0x80, 0xA0))
"""First bytes of small maps and lists (msgpack's fixmap and fixarray). In a text they are part of a non-ASCII
character."""
OPENING_LIMIT = 256 * 1024
"""Bytes of a peer's first message, at most, before the peer is known."""
_BULK = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xa4type(?:\xa5batch|\xablayer-table)", re.DOTALL)
"""The beginnings of a batch and a layer table: the type is the first field of every message."""

_NONSENSE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for bytes that are no message: no msgpack, no UTF-8, or nested endlessly."""
_LENGTH = struct.Struct(">I")
T = TypeVar("T")

FromRank = (
    rank.Hello | rank.LayerTable | rank.Batch | rank.PhaseChanged | rank.StageBegan | rank.SnapshotTaken | rank.Prepared
    | rank.RolledBack | rank.Published | rank.Reply | rank.Collected | rank.Goodbye | rank.MeetingFound
    | command.Query | command.Supervise
)  # fmt: skip
ToRank = (
    daemon.Welcome | daemon.Refused | daemon.Notice | daemon.Kept | daemon.Closing | daemon.Attend | daemon.Withhold
    | daemon.DaemonCost | daemon.Spacing | daemon.Prepare | daemon.Commit | daemon.Abort | daemon.Stop | daemon.Held
    | daemon.Publish | daemon.CancelPublish | daemon.Ask | daemon.FindMeeting | command.Answer | command.Standing
    | command.Order
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()


class _Typed(msgspec.Struct):
    type: str


_TYPES = frozenset(kind.__struct_config__.tag for kind in (*get_args(FromRank), *get_args(ToRank)))


class _Opening(msgspec.Struct):
    """The fields of a first message that any version can read."""

    type: str
    protocol: int


def frame(message: Message) -> bytes:
    """Encode one message. Raises `ProtocolError` if it is larger than a message of its kind may be."""
    body, limit = _ENCODER.encode(message), FRAME_LIMIT
    if isinstance(message, rank.Reply | rank.Collected):
        limit = PLAIN_LIMIT
    if len(body) > limit:
        raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {limit}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into message bodies, whatever the chunks it arrives in."""

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self.limit = limit
        """Bytes that a body may have. It may be changed between two frames."""
        self._pending = bytearray()

    @property
    def nbytes(self) -> int:
        """Bytes that have arrived and are not a complete frame yet."""
        return len(self._pending)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield each complete body. Raises `ProtocolError` at a length over `limit`: that is no frame of Sentinel."""
        self._pending += chunk
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit}: not Sentinel's")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            with memoryview(self._pending) as pending:
                body = bytes(pending[_LENGTH.size : end])  # one copy; bytes() of a plain slice would make two
            del self._pending[:end]
            yield body


def from_rank(body: bytes) -> FromRank:
    """Decode what a rank or the command line sent. Raises `ProtocolError`. For the daemon only: the garbage collector
    is switched off meanwhile, which is not Sentinel's decision in other processes."""
    if len(body) > PLAIN_LIMIT and not _BULK.match(body):
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {PLAIN_LIMIT} for one of its kind")
    if len(body) > CONTAINERS and not _BULK.match(body):
        containers = len(body) - len(body.translate(None, _CONTAINER))
        if containers > CONTAINERS:
            raise ProtocolError(f"a message of {containers} maps and lists, of which it may hold {CONTAINERS}")
    gc.disable()  # the result has no cycles, and searching for them takes several times as long as decoding
    try:
        return _decode(_of_ranks(), body)
    finally:
        gc.enable()


def to_rank(body: bytes) -> ToRank:
    """Decode what the daemon sent. Raises `ProtocolError`."""
    return _decode(_of_daemons(), body)


def is_known(body: bytes) -> bool:
    """Return whether this version has a message of that type. Another version of the same protocol may have more types,
    whose messages are ignored. Raises `ProtocolError` if the bytes are no message at all."""
    try:
        return msgspec.msgpack.decode(body, type=_Typed).type in _TYPES
    except _NONSENSE as error:
        raise ProtocolError(f"the peer does not speak Sentinel's protocol: {error}") from None


def opening_protocol(body: bytes) -> int:
    """Return the protocol version that a first message claims, whatever else is in it. Raises `ProtocolError`."""
    try:
        return msgspec.msgpack.decode(body, type=_Opening).protocol
    except _NONSENSE as error:
        raise ProtocolError(f"the peer does not speak Sentinel's protocol: {error}") from None


# Created on first use: each takes a millisecond, and no process needs the decoders of both sides.


@functools.cache
def _of_ranks() -> msgspec.msgpack.Decoder[FromRank]:
    return msgspec.msgpack.Decoder(FromRank)


@functools.cache
def _of_daemons() -> msgspec.msgpack.Decoder[ToRank]:
    return msgspec.msgpack.Decoder(ToRank)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except _NONSENSE as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from None


def unpack_column(typecode: Literal["d", "f", "q", "I", "H"], numbers: bytes) -> array[Any]:
    """Unpack a column. `typecode` as in the `array` module. Raises `ProtocolError` where it is cut short."""
    values: array[Any] = array(typecode)
    try:
        values.frombytes(numbers)
    except ValueError:
        raise ProtocolError(f"a packed column of {len(numbers)} bytes is cut short") from None
    return values
