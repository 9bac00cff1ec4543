"""The part of the protocol buffers wire format that event files need: fields of a message, read in place.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield (field number, wire type, value): an int for a varint, otherwise bytes. Raises ValueError if cut off."""
    at, end = 0, len(message)
    while at < end:
        key = message[at]
        at += 1
        if key >= 0x80:
            key, at = varint(message, at - 1)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(message, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            if at < end and message[at] < 0x80:  # most lengths are; a call for each would double the time
                length, at = message[at], at + 1
            else:
                length, at = varint(message, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > end:
            raise ValueError("a field is cut off")
        yield number, kind, message[at : at + length]
        at += length


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Return (value, where the next field begins). Raises ValueError if the number is cut off."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a number is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def decode_signed(value: int) -> int:
    """Return an int64 from its encoding, the two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def doubles(body: bytes) -> tuple[float, ...]:
    """Return the values of packed float64."""
    return struct.unpack(f"<{len(body) // 8}d", body[: len(body) // 8 * 8])


def floats(body: bytes) -> tuple[float, ...]:
    """Return the values of packed float32."""
    return struct.unpack(f"<{len(body) // 4}f", body[: len(body) // 4 * 4])
