"""Event files: one that torch.utils.tensorboard wrote, and others made byte by byte."""

from __future__ import annotations

import gzip
import math
import random
import struct
from pathlib import Path

import pytest

from sentinel.errors import LogError
from sentinel.toolkit import logs
from sentinel.toolkit.logs.tensorboard import compute_masked_crc

WRITTEN_BY_TORCH = Path(__file__).parent / "data" / "events.out.tfevents.1"
"""An event file that torch 2.13 with tensorboard 2.21 wrote.

It has 20 steps of train/loss = 4 - 0.1 i (13 is NaN), train/lr at every fifth, val/loss as tensors, a text, a
histogram, an infinity and a float64.
"""


def record(body: bytes) -> bytes:
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", compute_masked_crc(length)) + body + struct.pack("<I", compute_masked_crc(body))


def field(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | 2, len(body)]) + body


def event(step: int, tag: str, value: float) -> bytes:
    summary = field(1, field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
    return record(b"\x09" + struct.pack("<d", 1.7e9 + step) + b"\x10" + bytes([step]) + field(5, summary))


def test_the_checksum_is_that_of_its_standard() -> None:
    known = 0xE3069283  # CRC-32C, RFC 3720
    assert compute_masked_crc(b"123456789") == ((known >> 15 | known << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_file_that_torch_wrote_is_read() -> None:
    (recording,) = logs.read(WRITTEN_BY_TORCH)
    assert (recording.format, recording.timed, recording.faults.count) == ("TensorBoard", True, 0)
    steps, losses = recording.series("train/loss")
    assert steps == list(range(20))
    expected = [math.nan if i == 13 else 4 - 0.1 * i for i in range(20)]
    assert list(losses) == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert recording.series("train/lr")[0] == [0, 5, 10, 15]
    assert (recording.series("val/loss")[0], list(recording.series("val/loss")[1])) == ([0, 10], [3.0, 3.0])
    assert list(recording.series("grad_norm")[1]) == [math.inf]
    assert list(recording.series("huge")[1]) == [1e300]
    assert recording.names == ["train/loss", "train/lr", "val/loss", "grad_norm", "huge"]  # no text, no histogram


def test_a_folder_is_a_run_of_several_starts(tmp_path: Path) -> None:
    """A folder's files are ordered by the times in them, not by name: the second start resumed at step 2."""
    late = event(2, "loss", 2.5) + event(9, "loss", 2.0)
    (tmp_path / "events.out.tfevents.9.a").write_bytes(event(1, "loss", 4) + event(1, "lr", 0.5) + event(3, "loss", 3))
    (tmp_path / "events.out.tfevents.10.b").write_bytes(late)
    (recording,) = logs.read(tmp_path)
    assert recording.series("loss")[0] == [1, 3, 2, 9]
    assert recording.series("lr")[0] == [1]


def test_a_file_of_a_run_that_was_killed_ends_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(event(1, "loss", 4) + event(2, "loss", 3)[:-9])
    (recording,) = logs.read(path)
    assert (recording.series("loss")[0], recording.faults.count) == ([1], 0)


def test_damage_is_reported_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    damaged = bytearray(event(2, "loss", 3))
    damaged[-6] ^= 1
    path.write_bytes(event(1, "loss", 4) + bytes(damaged) + record(b"\x2a\x7f") + event(4, "loss", 2) + b"\0" * 12)
    (recording,) = logs.read(path)
    assert recording.series("loss")[0] == [1, 4]
    assert [fault.rpartition(f"{path}:")[2] for fault in recording.faults.shown] == [
        "2: record 2 is damaged: its checksum is wrong",
        "3: record 3 is no event: a field is cut off",
        "5: record 5 does not begin where it should; the rest is not read",
    ]


def test_a_folder_without_scalars_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(record(b""))
    with pytest.raises(LogError, match="no row of numbers in it, read as TensorBoard"):
        logs.read(tmp_path)


def test_a_gzipped_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    generator = random.Random(0)
    written = b"".join(event(step, "loss", generator.random()) for step in range(100))
    path = tmp_path / "events.out.tfevents.1.gz"
    path.write_bytes(gzip.compress(written)[:-500])
    for named in (path, tmp_path):
        (recording,) = logs.read(named)
        assert 50 < len(recording) < 100
