"""Reads the scalars of TensorBoard event files (`events.out.tfevents.*`), without TensorFlow or TensorBoard.

A file is a sequence of records: length (uint64), masked CRC-32C of the length (uint32), an Event message, masked
CRC-32C of the message. The messages are defined in tensorflow/core/util/event.proto, framework/summary.proto and
framework/tensor.proto; the framing in tensorflow/core/lib/io/record_writer.h. `torch.utils.tensorboard` writes scalars
as `simple_value`, TensorFlow 2 as tensors of one element.

A run is a folder: each start of the run writes another file into it.
"""

from __future__ import annotations

import functools
import gzip
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sentinel.toolkit.logs.protobuf import BYTES, FIXED32, FIXED64, VARINT, decode_signed, doubles, fields, floats
from sentinel.toolkit.logs.recording import Recording
from sentinel.toolkit.logs.text import open_log, read_until_cut

NAME = "TensorBoard"

CHECKED_BYTES = 4096
"""Most bytes of a record whose checksum is verified. A longer one holds pictures, histograms or the graph; its scalars,
if any, are read unchecked: CRC-32C of a megabyte takes Python a tenth of a second."""

RECORD_LIMIT = 1 << 30
_OTHER_AXIS = (" vs samples", " vs tokens", " vs steps")
"""Ends of tags that Megatron logs a second time, over something other than the step."""


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file begins with a record's length and its checksum."""
    return len(head) >= 12 and struct.unpack_from("<I", head, 8)[0] == compute_masked_crc(head[:8])


def read(path: Path) -> Recording:
    """Return all scalars of one file, or of all event files of a folder."""
    recording = Recording(path, NAME)
    for file in sorted(path.glob("*tfevents*"), key=_began) if path.is_dir() else [path]:
        rows: dict[int, tuple[float, dict[str, float]]] = {}
        for step, time, values in read_until_cut(file, _scalars(file, recording)):
            rows.setdefault(step, (time, {}))[1].update(values)
        for step, (time, values) in sorted(rows.items()):
            recording.add(step, time, values)
    return recording


def _began(path: Path) -> tuple[float, str]:
    """Return the time in the first event of a file, and its name: names need not sort by time."""
    with open_log(path) as file:
        for _, body in read_until_cut(path, _records(file, None)):
            return next((doubles(value)[0] for key, _, value in fields(body) if key == 1 and isinstance(value, bytes)),
                        0.0), path.name  # fmt: skip
    return 0.0, path.name


def _scalars(path: Path, recording: Recording) -> Iterator[tuple[int, float, dict[str, float]]]:
    with open_log(path) as file:
        for count, body in _records(file, recording):
            try:
                step, time, values = _event(body)
            except (ValueError, struct.error, UnicodeDecodeError) as error:
                recording.faults.add(count, f"record {count} is no event: {error}")
                continue
            if values and step >= 0:
                yield step, time, values


def _records(file: BinaryIO | gzip.GzipFile, recording: Recording | None) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, body). Ends at a record that is cut off, as the last record of a killed run is."""
    count = 0
    while len(header := file.read(12)) == 12:
        count += 1
        length, checksum = struct.unpack("<QI", header)
        if checksum != _crc_of_length(header[:8]) or length > RECORD_LIMIT:
            if recording is not None:
                recording.faults.add(count, f"record {count} does not begin where it should; the rest is not read")
            return
        body, end = file.read(length), file.read(4)
        if len(body) < length or len(end) < 4:
            return
        if length <= CHECKED_BYTES and struct.unpack("<I", end)[0] != compute_masked_crc(body):
            if recording is not None:
                recording.faults.add(count, f"record {count} is damaged: its checksum is wrong")
            continue
        yield count, body


def _event(body: bytes) -> tuple[int, float, dict[str, float]]:
    """Return (step, time, values) of an Event, whose fields are 1 wall_time, 2 step, 5 summary."""
    step, time, values = 0, math.nan, dict[str, float]()
    for key, kind, value in fields(body):
        if key == 1 and kind == FIXED64 and isinstance(value, bytes):
            (time,) = doubles(value)
        elif key == 2 and kind == VARINT and isinstance(value, int):
            step = decode_signed(value)
        elif key == 5 and isinstance(value, bytes):
            for inner, _, summary in fields(value):
                if inner == 1 and isinstance(summary, bytes):
                    values |= _value(summary)
    return step, time, values


def _value(body: bytes) -> dict[str, float]:
    """Return the scalar of a Summary.Value, if it is one; its fields are 1 tag, 2 simple_value, 8 tensor."""
    tag, number = "", None
    for key, kind, value in fields(body):
        if key == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif key == 2 and kind == FIXED32 and isinstance(value, bytes):
            (number,) = floats(value)
        elif key == 8 and isinstance(value, bytes):
            number = _tensor(value)
    return {} if number is None or tag.endswith(_OTHER_AXIS) else {tag: number}


def _tensor(body: bytes) -> float | None:
    """Return the value of a TensorProto with one float32 (dtype 1) or float64 (dtype 2); None for any other.

    Its fields are 1 dtype, 2 shape, 4 tensor_content, 5 float_val, 6 double_val.
    """
    dtype, found = 0, None
    content = b""
    for key, kind, value in fields(body):
        if key == 1 and isinstance(value, int):
            dtype = value
        elif key == 4 and isinstance(value, bytes):
            content = value
        elif key in (5, 6) and kind in (BYTES, FIXED32, FIXED64) and isinstance(value, bytes):
            found = floats(value) if key == 5 else doubles(value)
    if found is None and dtype in (1, 2):
        found = floats(content) if dtype == 1 else doubles(content)
    return found[0] if found is not None and len(found) == 1 else None


def compute_masked_crc(body: bytes) -> int:
    """Return the masked CRC-32C (Castagnoli): rotated and shifted, as the data may hold checksums itself."""
    crc = 0xFFFFFFFF
    for byte in body:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]

_crc_of_length = functools.lru_cache(1024)(compute_masked_crc)
"""The checksum of a length, cached: a file has few different lengths, each many times."""
