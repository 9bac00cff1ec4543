"""Writes the demo's data: the text of the standard library as one shuffled file of rows, with a part of it damaged.

The training script knows nothing of the fault: it reads what the file holds.

    spike   the rows are still compressed, as in a shard that was never unpacked: bytes, but noise to a model of text
    nan     the rows are zeros, as in a file with a hole that a broken copy left: nothing but padding, and the mean over
            no bytes is 0 / 0
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

BATCH_ROWS, ROW_BYTES = 16, 65
"""Rows of a batch and bytes of a row, as in examples/train_gpt.py."""
BURST = 40
"""Number of damaged batches, and the scripts' `skip_batches`. At the example's learning rate (3e-3) they wrecked all
seeds that were tried; at half of it the network learns again within 60 steps."""
SMALL_ROWS = 4
"""Rows of a batch of the twins: fp16 takes eight times as long on a CPU, and a leak is seen after 1,280 steps."""

Fault = Literal["spike", "nan"]


class Damage(msgspec.Struct, frozen=True):
    """Which batches are damaged, and how."""

    fault: Fault
    first: int
    """Number, from 0, of the first damaged batch: the step at which a run without rollback meets it."""
    batches: int

    @property
    def last(self) -> int:
        """Number of the last damaged batch."""
        return self.first + self.batches - 1

    @property
    def description(self) -> str:
        """What is wrong with the data, in a few words."""
        return {"spike": "text that was never decompressed", "nan": "a hole in the file, read as zeros"}[self.fault]


def write_shard(path: Path, *, batches: int, batch_rows: int, row_bytes: int, seed: int, damage: Damage | None) -> None:
    """Write `batches` of `batch_rows` rows of `row_bytes` bytes to `path`. Same seed, same file."""
    text = library_text()
    starts = list(range(0, len(text) - row_bytes, row_bytes))
    random.Random(seed).shuffle(starts)
    rows = [text[start : start + row_bytes] for start in starts[: batches * batch_rows]]
    assert len(rows) == batches * batch_rows, "the standard library is shorter than the demo"
    if damage is not None:
        first, stop = damage.first * batch_rows, (damage.first + damage.batches) * batch_rows
        ruin = zlib.compress(text, 1) if damage.fault == "spike" else bytes(len(text))
        rows[first:stop] = [ruin[n * row_bytes : (n + 1) * row_bytes] for n in range(stop - first)]
    path.write_bytes(b"".join(rows))


def write_blanked(path: Path, *, batches: int, seed: int, blank: Iterable[int]) -> None:
    """Write a shard for the twins, in batches of `SMALL_ROWS`, clean except for the rows in `blank`: padding."""
    write_shard(path, batches=batches, batch_rows=SMALL_ROWS, row_bytes=ROW_BYTES, seed=seed, damage=None)
    shard = bytearray(path.read_bytes())
    for row in blank:
        shard[row * ROW_BYTES : (row + 1) * ROW_BYTES] = bytes(ROW_BYTES)
    path.write_bytes(shard)


def blanks(fault: str, first: int, batches: int) -> range:
    """Return the blank rows: the last one of each batch from `first` on (scaler), or all of batch `first` (hang)."""
    if fault == "scaler":
        return range((first + 1) * SMALL_ROWS - 1, batches * SMALL_ROWS, SMALL_ROWS)
    return range(first * SMALL_ROWS, (first + 1) * SMALL_ROWS) if fault == "hang" else range(0)


def library_text() -> bytes:
    """Return the text of all top-level modules of the standard library, one after the other."""
    return b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
