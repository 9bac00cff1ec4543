"""Reads Weights & Biases' own files of a run (`run-ID.wandb`, offline or not), without the package.

A file is 7 bytes of header, then LevelDB's log format (google/leveldb, doc/log_format.md): blocks of 32 KiB with
pieces of records, each after a checksum (CRC-32 of the type and the piece), a length and a type. A record is a message
of wandb/proto/wandb_internal.proto; the rows (`history`) and the name (`run`) are read.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.jsonl import parse_json
from sentinel.toolkit.logs.protobuf import fields
from sentinel.toolkit.logs.recording import Recording
from sentinel.toolkit.logs.text import open_log, read_until_cut

NAME = "W&B"

_HEADER, _MAGIC = 7, b":W&B"
_BLOCK = 32 * 1024
_PIECE = struct.Struct("<IHB")
"""Header of a piece: checksum, length, type."""
_WHOLE, _FIRST, _LAST = 1, 2, 4
"""Types of pieces; type 3 is between first and last."""


def recognise(path: Path, head: bytes) -> bool:
    """Whether the file begins with W&B's magic bytes."""
    return head.startswith(_MAGIC)


def read(path: Path) -> Recording:
    """Return all rows that were committed. Raises LogError if the file cannot be read."""
    recording = Recording(path, NAME)
    with open_log(path) as file:
        for count, record in enumerate(read_until_cut(path, _records(file, recording)), 1):
            try:
                _take(recording, count, record)
            except ValueError as error:
                recording.faults.add(count, f"record {count} cannot be read: {error}")
    return recording


def _records(file: BinaryIO | gzip.GzipFile, recording: Recording) -> Iterator[bytes]:
    """Yield the records. Ends at one that is cut off, as the last record of a killed run is. The rest of a damaged
    block is left out."""
    record, block, number = b"", file.read(_BLOCK)[_HEADER:], 0
    while block:
        number += 1
        at = 0
        while at + _PIECE.size <= len(block):
            checksum, length, kind = _PIECE.unpack_from(block, at)
            piece = block[at + _PIECE.size : at + _PIECE.size + length]
            at += _PIECE.size + length
            if at > len(block):
                break
            if checksum != zlib.crc32(piece, zlib.crc32(bytes([kind]))):
                recording.faults.add(number, f"block {number} is damaged: a checksum is wrong; its rest is not read")
                record = b""
                break
            record = piece if kind in (_WHOLE, _FIRST) else record + piece
            if kind in (_WHOLE, _LAST):
                yield record
        block = file.read(_BLOCK)


def _take(recording: Recording, count: int, record: bytes) -> None:
    """Add a record, whose fields are 2 history, 17 run."""
    for key, _, value in fields(record):
        if key == 2 and isinstance(value, bytes):
            rows.take(recording, count, _row(value))
        elif key == 17 and isinstance(value, bytes):
            found = {number: text for number, _, text in fields(value) if isinstance(text, bytes)}
            recording.run = found.get(8, found.get(1, b"")).decode()  # display_name, otherwise run_id


def _row(history: bytes) -> dict[str, object]:
    """Return the row of a HistoryRecord: 1 item; its HistoryItem: 1 key, 2 nested_key (repeated), 16 value_json."""
    row = dict[str, object]()
    for key, _, item in fields(history):
        if key == 1 and isinstance(item, bytes):
            parts = [(number, part.decode()) for number, _, part in fields(item) if isinstance(part, bytes)]
            name = "/".join(part for number, part in parts if number in (1, 2))
            row[name] = next((parse_json(part) for number, part in parts if number == 16), None)
    return row
