"""Turns a step's values, which may still be on the device, into records of plain numbers and batches to send.

On the CPU values are read immediately. On CUDA all values of a step are packed into one float32 buffer on the device,
which one asynchronous copy brings to pinned memory; a word that says "arrived" is copied after it on the same stream,
so that it arrives last. The sender's thread polls the word: it must not query CUDA events, which takes the driver's
lock. Nothing is done while the stream is capturing a graph.

Records wait in a bounded queue, from which the oldest is dropped when it is full. Before the daemon takes any, the
first steps are kept, and those right after them are dropped: rules look back on a run's start, and a fast loop makes
thousands of steps while its daemon starts. Two threads use it without a lock: the training thread calls `put`, or
appends ordinary steps to `records`; the sender's thread calls `take`.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import cast

import msgspec
import torch

from sentinel import wire
from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.measure.probes.memory import OF_PROCESS
from sentinel.hooks.torch_interop.layer_table import Layers
from sentinel.hooks.torch_interop.tensors import pack_float32


class Record(msgspec.Struct):
    """One step, to be sent."""

    stream: int
    seq: int
    time: float
    table: wire.LayerTable
    """The table that `block` and `rows` refer to."""
    values: dict[str, float] = {}
    rows: bytes = b""
    block: dict[str, bytes] = {}
    """Layer signal -> float32, packed."""
    transfer: _Transfer | None = None

    def ready(self) -> bool:
        """Whether all values have arrived. Always true on the CPU."""
        if self.transfer is not None and self.transfer.has_arrived():
            self.transfer.unpack(self)
            self.transfer = None
        return self.transfer is None

    def peek(self, name: str) -> float | None:
        """Return a value that was on a device once it has arrived, whichever thread unpacks it; None before that.

        On the training thread: only that thread reuses buffers.
        """
        transfer = self.transfer
        if transfer is None:
            return self.values[name]
        return transfer.peek(name) if transfer.has_arrived() else None

    def nbytes(self) -> int:
        """Return the bytes of the layer statistics, which are most of a record, including those still being copied."""
        size = len(self.rows) + sum(map(len, self.block.values()))
        return size if self.transfer is None else size + self.transfer.layer_bytes

    def strip(self) -> None:
        """Leave the layer statistics out."""
        self.block, self.rows = {}, b""
        if self.transfer is not None:
            self.transfer.layers_wanted = False


def record(step: Step, layers: Layers, time: float, transfers: Transfers, unseen: Unseen) -> Record:
    """Make a record of a step. Values on the host are read now, those on a device are copied asynchronously."""
    made = Record(layers.stream, step.seq, time, layers.table, cast("dict[str, float]", step.values))
    if step.gradients is not None and step.layers and len(step.gradients.rows) < len(layers.table.layers):
        made.rows = array("I", step.gradients.rows).tobytes()
    on_device: list[tuple[str, bool, torch.Tensor]] = []
    # Nearly all are floats, nearly always: any more work is measurable in a loop of a few ms.
    for name, value in [pair for pair in step.values.items() if type(pair[1]) is not float]:
        try:
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                on_device.append((name, False, _check_number(value)))
                del step.values[name]
                continue
            step.values[name] = float(value)
        except Exception:  # the value comes from a plugin's probe
            del step.values[name]
            unseen.swallow(name, f"the value of {name}", "without it")
        else:
            if unseen.pausing:
                unseen.recover(name)
    for name, column in step.layers.items():
        if isinstance(column, bytes):
            made.block[name] = column
        elif column.device.type == "cpu":
            made.block[name] = pack_float32(column)
        else:
            on_device.append((name, True, column))
    if on_device:
        made.transfer = transfers.begin(on_device)
    return made


def _check_number(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is one real number. Raises ValueError for another."""
    if value.numel() != 1 or value.is_complex():
        raise ValueError(f"a tensor of shape {tuple(value.shape)} and {value.dtype} is no number")
    return value


class Transfers:
    """Pinned buffers, reused once they were read; as many as there are steps in flight."""

    def __init__(self) -> None:
        self._free: deque[torch.Tensor] = deque()
        self._ones: dict[torch.device, torch.Tensor] = {}

    def begin(self, parts: list[tuple[str, bool, torch.Tensor]]) -> _Transfer:
        """Start copying `parts`: (signal, whether of layers, tensor)."""
        device = parts[0][2].device
        flat = [tensor.reshape(-1).to(device, torch.float32, non_blocking=True) for _, _, tensor in parts]
        payload = flat[0] if len(flat) == 1 else torch.cat(flat)  # for most steps this is only the loss
        if device not in self._ones:
            self._ones[device] = torch.ones(1, dtype=torch.float32, device=device)
        buffer = self._buffer(payload.numel() + 1)
        buffer[1 : payload.numel() + 1].copy_(payload, non_blocking=True)
        buffer[:1].copy_(self._ones[device], non_blocking=True)
        return _Transfer(
            buffer, [(name, layered, part.numel()) for (name, layered, _), part in zip(parts, flat, strict=True)], self
        )

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that was read."""
        self._free.append(buffer)

    def _buffer(self, size: int) -> torch.Tensor:
        try:
            buffer = self._free.popleft()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.float32, device="cpu")
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.float32, device="cpu", pin_memory=torch.cuda.is_available())
        buffer[0] = 0.0
        return buffer


class _Transfer:
    """One copy that is under way."""

    def __init__(self, buffer: torch.Tensor, parts: list[tuple[str, bool, int]], home: Transfers) -> None:
        self.layers_wanted = True
        self._buffer, self._parts, self._home = buffer, parts, home
        self._word = ctypes.c_float.from_address(buffer.data_ptr())

    @property
    def layer_bytes(self) -> int:
        """Bytes of its layer statistics, unless they are left out."""
        return 4 * sum(size for _, layered, size in self._parts if layered) if self.layers_wanted else 0

    def has_arrived(self) -> bool:
        return self._word.value == 1.0

    def brings(self, name: str) -> bool:
        """Whether a number of that name is under way."""
        return any(known == name for known, _, _ in self._parts)

    def peek(self, name: str) -> float:
        """Return the number of that name, without taking it."""
        begin = 1
        for known, _, size in self._parts:
            if known == name:
                break
            begin += size
        return float(self._buffer[begin])

    def unpack(self, into: Record) -> None:
        begin = 1
        for name, layered, size in self._parts:
            part = self._buffer[begin : begin + size]
            if not layered:
                into.values[name] = float(part)
            elif self.layers_wanted:
                into.block[name] = pack_float32(part)
            begin += size
        self._home.give_back(self._buffer)


QUEUE_STEPS = 2048
"""Most steps that may wait; above it the oldest is dropped and counted."""
FIRST_STEPS = 512
"""Number of the run's first steps that may wait as well, as long as none was taken."""
QUEUE_BYTES = 8 * 1024 * 1024
"""Most bytes of layer statistics that wait in the queue; above it new ones are left out."""
WAITED_SECONDS = 3.0
"""A longer gap between two takes has the steps in it sent without the memory of their process. That memory includes the
queue: it rises in a straight line, by up to 12 MB, while a daemon is stopped. Longer than `sender.INTERVAL_SECONDS`. A
step that waits for its device alone keeps its memory."""


class StepQueue:
    """The steps that wait to be sent, oldest first."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque()
        """An ordinary record (no layers, nothing on a device) may be appended, up to `QUEUE_STEPS`."""
        self.dropped = 0
        """Number of steps dropped so far."""
        self._next_seq = 0
        self._first: deque[Record] = deque()
        """The run's first steps, if the queue was full before any was taken: they are not dropped."""
        self._begun = False
        """Whether any step was taken."""
        self._bytes_in = self._bytes_out = 0  # one writer each: no lock
        self._taken_at, self._gap_end = time.time(), 0.0
        """When steps were last taken, and when they were last taken after a gap of more than `WAITED_SECONDS`."""

    def put(self, record: Record) -> None:
        """Queue a step. If the queue is full, the oldest step is dropped and counted.

        Before the first `take`, the run's first steps are kept and the oldest after them is dropped. If there are too
        many bytes, this step's layers are left out.
        """
        if record.block or record.transfer is not None or len(self.records) >= QUEUE_STEPS:
            self._make_room(record)
        self.records.append(record)

    def take(self, most: int) -> list[Record]:
        """Return the next steps of one optimizer whose values have arrived, in order, at most `most`. Steps of a
        time in which none were taken for more than `WAITED_SECONDS` are without the memory of the process."""
        records: list[Record] = []
        now = time.time()
        if now - self._taken_at > WAITED_SECONDS:
            self._gap_end = now
        self._taken_at = now
        while len(records) < most and (waiting := self._first or self.records):
            try:
                self._pass(waiting[0])
                record = waiting.popleft()
            except IndexError:  # the queue was full, and the other thread dropped the head
                break
            if not record.ready() or (records and record.stream != records[0].stream):
                waiting.appendleft(record)
                break
            self._bytes_out += record.nbytes()
            self._begun = True
            if record.time < self._gap_end:
                for name in OF_PROCESS:
                    record.values.pop(name, None)
            records.append(record)
        return records

    def clear(self) -> None:
        """Drop the steps that still wait: they will not be sent. `next_seq` stays."""
        self._next_seq = self.next_seq
        self._first.clear()
        self.records.clear()

    @property
    def head(self) -> Record | None:
        """The oldest step that waits; None: there is none."""
        waiting = self._first or self.records
        return waiting[0] if waiting else None

    @property
    def next_seq(self) -> int:
        """Sequence number after the last step of the first optimizer that was queued."""
        for record in reversed([*self.records]):
            if not record.stream:
                return record.seq + 1
        return self._next_seq

    def _pass(self, record: Record) -> None:
        """Update `next_seq` for a record that is about to leave the queue."""
        if not record.stream:
            self._next_seq = record.seq + 1

    def _make_room(self, record: Record) -> None:
        if len(self.records) >= QUEUE_STEPS:
            try:
                if not (self._begun or self._first):
                    self._first.extend(self.records.popleft() for _ in range(FIRST_STEPS))
                else:
                    self._pass(self.records[0])
                    self._bytes_in -= self.records.popleft().nbytes()
                    self.dropped += 1
            except IndexError:  # the sender was quicker
                pass
        if self._bytes_in - self._bytes_out > QUEUE_BYTES:
            record.strip()
        self._bytes_in += record.nbytes()


LARGEST = 512
"""Most steps in one batch: rows are numbered by uint16."""


def make_batch(records: Sequence[Record], *, dropped: int, pace: wire.Pace | None, skipped: int = 0) -> wire.Batch:
    """Make one batch of the steps of one optimizer, in their order. `pace`: None if it did not change."""
    rows: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for row, record in enumerate(records):
        for name, value in record.values.items():
            if name not in values:
                rows[name], values[name] = [], []
            rows[name].append(row)
            values[name].append(value)
    return wire.Batch(
        stream=records[0].stream,
        seqs=array("q", [record.seq for record in records]).tobytes(),
        times=array("d", [record.time for record in records]).tobytes(),
        columns={name: _column(rows[name], column, len(records)) for name, column in values.items()},
        layers=tuple(_block(record) for record in records if record.block),
        dropped=dropped,
        skipped=skipped,
        pace=pace,
    )


def _column(rows: list[int], values: list[float], height: int) -> wire.Column:
    present = b"" if len(rows) == height else array("H", rows).tobytes()
    return wire.Column(values=array("d", values).tobytes(), rows=present)


def _block(record: Record) -> wire.LayerBlock:
    return wire.LayerBlock(seq=record.seq, table=record.table.digest, stats=record.block, layers=record.rows)
