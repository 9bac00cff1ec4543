"""Snapshots of a run's whole state in host memory, and the ring that holds them.

    exit of step s      begin(s): copy; a thread sums up what was copied. Code that looks at the snapshot, or reuses
                        its memory, waits for that

Parameters and optimizer state on a GPU change only inside a step, and are copied beside the loop:

    exit of step s      begin(s): copy the rest; a thread for these, and a write detector over them
    forward, backward   the thread copies
    entry of step s+1   settle(): wait for the copy, ask the write detector; the snapshot is complete, or torn

A snapshot is torn if something wrote to the weights between the steps (an EMA swap, clipping of weights), or moved them
to other memory. It is discarded, and from then on copies are made at once, inside the step. In host memory they always
are: a step there reads and writes as much several times over, and a thread would take its cores.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sentinel.errors import RollbackError
from sentinel.hooks.core.faults import Unseen
from sentinel.hooks.core.threads import Task, Worker
from sentinel.hooks.snapshot.capture import Capture, Cell, Copies, Immediate, Part
from sentinel.hooks.snapshot.host_buffer import HostBuffer, WriteDetector, give_back
from sentinel.hooks.snapshot.parts import RunState
from sentinel.hooks.torch_interop.tensors import has_nonfinite

logger = logging.getLogger(__name__)


class Snapshot:
    """The state at the exit of one step. Its memory is reused for the next one."""

    def __init__(self) -> None:
        self.seq = -1
        self.seconds = 0.0
        """Time that the copying took, on whichever thread."""
        self._kept: dict[str, Any] = {}
        """What the parts took, by their names."""
        self._capture = Capture()
        self._stable, self._volatile, self._finished = HostBuffer(), HostBuffer(), HostBuffer()
        self._checksums: tuple[int, int] | None = None
        self.sealing: Task | None = None
        """The task that sums up what was copied. Any thread may wait for it."""
        self._late: dict[str, Any] | None = None
        self._told = ""
        self._arrival: list[torch.cuda.Event] = []
        """Events after which what `finish` noted is in host memory."""

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs that the tensors are on."""
        return gpus_of(self._cells())

    @property
    def beside(self) -> bool:
        """Whether it is worth copying beside the loop."""
        return bool(self.gpus)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it holds."""
        return self._stable.nbytes + self._volatile.nbytes + self._finished.nbytes

    def take(self, seq: int, parts: Sequence[Part], afford: Callable[[int], None]) -> None:
        """Note the state, and copy what may change as soon as the step is over. `copy` and `seal` must follow.

        `afford` gets the number of bytes that are needed before they are allocated, and raises if they are too many.
        """
        self.wait()
        started = time.perf_counter()
        self.seq, self._capture, self._late, self._checksums = seq, Capture(), None, None
        self._kept = {part.name: part.take(self._capture) for part in parts}
        afford(
            HostBuffer.count_taken_bytes(self._capture.stable) + HostBuffer.count_taken_bytes(self._capture.volatile)
        )
        self._volatile.seat(self._capture.volatile)
        self._volatile.fill(self._capture.volatile)
        self.seconds = time.perf_counter() - started

    def finish(self, parts: Sequence[Part], afford: Callable[[int], None]) -> None:
        """Note for the disk what the loop did after the step, once the iteration is over."""
        started = time.perf_counter()
        capture = Capture()
        late = {part.name: part.take(capture) for part in parts if part.late and part.name in self._kept}
        cells = capture.stable + capture.volatile
        afford(sum(map(HostBuffer.count_taken_bytes, (self._capture.stable, self._capture.volatile, cells))))
        self._finished.seat(cells)
        self._finished.fill(cells)
        for cell in cells:
            cell.source = None
        self._late = late  # not before it is copied: what is noted only refers to live tensors
        self._arrival = [_record_event(device) for device in gpus_of(cells)]
        self.seconds += time.perf_counter() - started

    def write_detector(self) -> WriteDetector:
        """Return a detector over the live tensors that `copy` copies."""
        return WriteDetector(self._capture.stable)

    def copy(self) -> None:
        """Copy parameters and optimizer state."""
        started = time.perf_counter()
        self._stable.seat(self._capture.stable)
        self._stable.fill(self._capture.stable)
        for device in self.gpus:
            torch.cuda.current_stream(device).synchronize()
        self.seconds += time.perf_counter() - started

    def seal(self) -> None:
        """Sum up what was copied, for `flaw` to compare.

        For several GB this takes longer than a GPU's step, which the copy itself must not.
        """
        self._checksums = self._compute_checksums()
        if (unfit := self._nonfinite()) and unfit != self._told:
            self._told = unfit
            logger.warning("nothing goes back to the snapshot of step %d: %s is not finite", self.seq, unfit)

    def _compute_checksums(self) -> tuple[int, int]:
        return self._stable.checksum(), self._volatile.checksum()

    def wait(self) -> None:
        """Wait until it is sealed."""
        if self.sealing is not None:
            self.sealing.wait()

    def release(self) -> None:
        """Release the live tensors once they are copied."""
        for cell in self._cells():
            cell.source = None

    def flaw(self) -> str:
        """Return why it is unfit to go back to; empty if it is fit."""
        self.wait()
        if self._checksums is None:
            return f"the snapshot of step {self.seq} has no checksum: making it failed"
        if self._checksums != self._compute_checksums():
            return f"the snapshot of step {self.seq} is not what was written: its checksum has changed"
        unfit = self._nonfinite()
        return f"the snapshot of step {self.seq} is not finite: {unfit}" if unfit else ""

    def _nonfinite(self) -> str:
        """Return the name of a tensor that should be finite and is not; empty if there is none."""
        if self._stable.nonfinite() or self._volatile.nonfinite():
            return next((cell.name for cell in self._cells() if cell.judged and has_nonfinite(cell.kept)), "")
        return ""

    def restore(self, parts: Sequence[Part]) -> list[str]:
        """Put everything back, in place. Returns the names of what is younger, and stays as it is.

        Raises RollbackError, with nothing changed, if that cannot be done, and HalfRestored if something was changed.
        """
        put_back(parts, self._kept)
        kept = self._kept
        younger = [[part.name] if part.name not in kept else part.list_younger(kept[part.name]) for part in parts]
        return [name for names in younger for name in names]

    def export_named(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return what it holds at the end of the iteration, by names, for the disk. Raises RollbackError before
        `finish`."""
        if self._late is None:
            raise RollbackError(f"the iteration of step {self.seq} is not over")
        for arrival in self._arrival:
            arrival.synchronize()
        late = self._late
        return {p.name: p.export_named(late.get(p.name, self._kept[p.name])) for p in parts if p.name in self._kept}

    def _cells(self) -> list[Cell]:
        return self._capture.stable + self._capture.volatile


def gpus_of(cells: Sequence[Cell]) -> list[torch.device]:
    """Return the GPUs that the tensors are on."""
    return sorted({cell.device for cell in cells if cell.device.type == "cuda"}, key=str)


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class HalfRestored(Exception):
    """A restore failed, and what it had changed could not be put back."""


def put_back(parts: Sequence[Part], kept: Mapping[str, Any]) -> None:
    """Put back what the parts took, in place, all or nothing.

    Raises RollbackError, with everything as it was, if a part cannot be put back; HalfRestored if that could not be
    undone.
    """
    taken = [(part, kept[part.name]) for part in parts if part.name in kept]
    foreign = [(part, value) for part, value in taken if part.foreign]
    for part, value in taken:
        part.check(value)
    copies, before = Copies(), Immediate()
    try:
        present = [(part, part.take(before)) for part, _ in foreign]
    except Exception as error:
        raise RollbackError(f"state could not be read before it was put back: {error!r}") from error
    # Parts that may raise go first, as long as the rest is as it was.
    for begun, (part, value) in enumerate(foreign, 1):
        try:
            part.give(value, copies)
        except Exception as error:
            _undo(present[:begun], f"{part.name} could not be loaded: {error!r}")
            raise RollbackError(f"{part.name} could not be loaded: {error!r}") from error
    for part, value in taken:
        if part.foreign:
            continue
        try:
            part.give(value, copies)
        except Exception as error:  # no memory for a tensor that has to be made again
            copies.take_back()
            _undo(present, f"{part.name} could not be put back: {error!r}")
            raise RollbackError(f"{part.name} could not be put back: {error!r}") from error
    try:
        copies.make()
    except Exception as error:
        raise HalfRestored(f"the copies into live tensors broke off: {error!r}") from error


def _undo(present: Sequence[tuple[Part, Any]], reason: str) -> None:
    """Put these parts back as they were. Raises HalfRestored if one fails; the others are put back all the same."""
    copies, failed = Copies(), ""
    for part, value in reversed(present):
        try:
            part.give(value, copies)
        except Exception as error:
            failed = f"{part.name}: {error!r}"
    copies.make()
    if failed:
        raise HalfRestored(f"{reason}; what had been loaded could not be undone: {failed}")


class Ring:
    """At most `keep` snapshots. Only the training thread uses it; `held` may be read on any.

    An exception leaves it a snapshot short: close it then. So does an interrupt, but that is made good.
    """

    def __init__(
        self,
        state: RunState,
        *,
        keep: int,
        margin: int,
        afford: Callable[[int], None],
        unseen: Unseen | None = None,
    ) -> None:
        """`afford`: see `Snapshot.take`. `unseen` records what fails beside the loop."""
        self.held: tuple[int, ...] = ()
        """Sequence numbers of the complete snapshots, rising."""
        self.shared: set[int] = set()
        """Sequence numbers of snapshots known to be held by all ranks. Any thread adds to it."""
        self._state, self._keep, self._margin, self._afford = state, keep, margin, afford
        self._complete: list[Snapshot] = []
        self._free: list[Snapshot] = [Snapshot() for _ in range(keep)]
        self._pinned: Snapshot | None = None
        self._copying: _Copying | None = None
        self._begun: Snapshot | None = None
        self.overlap = True
        """Whether copies are made beside the loop. Off permanently after the first torn one."""
        self._unseen = unseen or Unseen()
        # Two threads: a step may wait for a copy, and the checksum of the snapshot before takes longer than a step.
        self._copier, self._sealer = (
            Worker("sentinel-snapshot", finishes=True),
            Worker("sentinel-checksum", finishes=True),
        )
        for worker in (self._copier, self._sealer):
            worker.start()

    def make_room(self, seq: int) -> tuple[int, ...] | None:
        """Give up a snapshot for the one of `seq`, if needed; return the seqs given up. None: none may be given up.

        It is the oldest, but never the newest of those that are old enough to be good, nor one that is pinned. If ranks
        took different ones, the newest good one that all of them hold is kept: no rank can go back to another.
        """
        self._replace_lost()
        if self._free:
            return ()
        old = [held for held in self.held if held <= seq - self._margin]
        good = max([held for held in old if held in self.shared] or old, default=None)
        for snapshot in self._complete:
            if snapshot.seq != good and snapshot is not self._pinned:
                self._drop(snapshot)
                return (snapshot.seq,)
        return None

    def _replace_lost(self) -> None:
        """Replace a snapshot lost to a keyboard interrupt in `begin` or `settle` by a new one."""
        copied = self._copying.snapshot if self._copying is not None else None
        known = {id(one) for one in (*self._free, *self._complete, self._pinned, copied) if one is not None}
        self._free += [Snapshot() for _ in range(self._keep - len(known))]

    def pin(self, seq: int) -> Snapshot | None:
        """Keep the snapshot of `seq` as it is until `unpin`. Returns None if it is not held, or another one is
        pinned."""
        if self._pinned is None:
            self._pinned = self.find(seq)
            return self._pinned
        return None

    def unpin(self) -> None:
        """Let the pinned snapshot be given up. Its memory is reused if it was dropped meanwhile."""
        snapshot, self._pinned = self._pinned, None
        if snapshot is not None and snapshot not in self._complete:
            self._free.append(snapshot)

    def begin(self, seq: int) -> Snapshot | None:
        """Take the snapshot of `seq` into the room that was made. Returns it if it is complete at once."""
        self._begun = snapshot = self._free.pop()
        self._state.refresh()
        snapshot.take(seq, self._state.parts, self._afford)
        if self.overlap and snapshot.beside:
            self._copying = copying = _Copying(snapshot, self._copier)
            snapshot.sealing = self._sealer.submit(partial(_seal, snapshot, self._unseen, copying))
            return None
        try:
            snapshot.copy()
        except Exception as fault:
            raise RollbackError(f"a snapshot could not be copied: {fault}") from fault
        snapshot.sealing = self._sealer.submit(partial(_seal, snapshot, self._unseen))
        return self._keep_complete(snapshot)

    def break_off(self) -> None:
        """Give up the snapshot being taken, which failed. `make_room` makes another one for it."""
        copying, self._copying, self._begun = self._copying, None, None
        if copying is not None:
            with contextlib.suppress(RollbackError):
                copying.join()

    def finish(self) -> None:
        """Finish the snapshot that was begun in the iteration now over. Does nothing the second time."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.finish(self._state.parts, self._afford)

    def settle(self) -> tuple[Snapshot | None, bool]:
        """Wait for a copy that is under way. Returns the snapshot if it is complete, and whether it was torn."""
        copying, self._copying = self._copying, None
        if copying is None:
            return None, False
        if copying.join():
            return self._keep_complete(copying.snapshot), False
        self.overlap = False
        copying.snapshot.release()
        self._free.append(copying.snapshot)
        logger.warning(
            "weights or optimizer state were written to between two steps, or put elsewhere (an EMA swap, clipping of "
            "weights, share_memory?): "
            "from now on snapshots are copied inside the step, which costs more time"
        )
        return None, True

    @property
    def copying(self) -> bool:
        """Whether a copy is under way."""
        return self._copying is not None

    def find(self, seq: int) -> Snapshot | None:
        """Return the complete snapshot of `seq`; None if there is none."""
        return next((snapshot for snapshot in self._complete if snapshot.seq == seq), None)

    def void_after(self, seq: int) -> tuple[int, ...]:
        """Drop the snapshots that are younger than `seq`, as their past has been undone. Returns their seqs."""
        younger = [snapshot for snapshot in self._complete if snapshot.seq > seq]
        for snapshot in younger:
            self._drop(snapshot)
        return tuple(snapshot.seq for snapshot in younger)

    def close(self) -> None:
        """Release all memory."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait()
            copying = None
        for snapshot in (*self._complete, *self._free):
            snapshot.wait()
            del snapshot  # else it holds the last one's memory
        self.held, self._keep = (), 0
        self._complete, self._free, self._pinned, self._begun = [], [], None, None
        for worker in (self._copier, self._sealer):
            worker.close()
        give_back()

    def _keep_complete(self, snapshot: Snapshot) -> Snapshot:
        snapshot.release()
        self._complete.append(snapshot)
        self.held = tuple(held.seq for held in self._complete)
        return snapshot

    def _drop(self, snapshot: Snapshot) -> None:
        self._complete.remove(snapshot)
        self.shared.discard(snapshot.seq)
        if snapshot is not self._pinned:
            self._free.append(snapshot)
        self.held = tuple(held.seq for held in self._complete)


class _Copying:
    """A copy under way beside the loop."""

    def __init__(self, snapshot: Snapshot, copier: Worker) -> None:
        self.snapshot = snapshot
        self._detector = snapshot.write_detector()
        self._fault: BaseException | None = None
        self._streams = [_behind(device) for device in snapshot.gpus]
        self._copied = copier.submit(self._run)

    def _run(self) -> None:
        try:
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for stream in self._streams:  # of each GPU: the current one is per thread, as the device is
                    stack.enter_context(torch.cuda.stream(stream))
                self.snapshot.copy()
        except BaseException as fault:
            self._fault = fault

    def wait(self) -> bool:
        """Wait until it is over. Returns whether everything was copied."""
        return self._copied.wait() and self._fault is None

    def join(self) -> bool:
        """Wait for it. Returns whether the sources are what they were. Raises what went wrong in the thread."""
        if not self.wait():
            raise RollbackError(f"a snapshot could not be copied: {self._fault}") from self._fault
        return not self._detector.has_changed()


def _seal(snapshot: Snapshot, unseen: Unseen, copying: _Copying | None = None) -> None:
    """Sum up what was copied, once it is. A function, so that no thread holds the ring, and with it the model."""
    if copying is None or copying.wait():
        with unseen.swallow_faults("checksums of snapshots", "nothing goes back to that snapshot"):
            snapshot.seal()


_streams: dict[torch.device, torch.cuda.Stream] = {}
"""One stream of each GPU for all copies: torch hands out 32 of them in turn, and another one may be the loop's own."""


def _behind(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of the copies, which waits for all that the loop has launched so far."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    _streams[device].wait_stream(torch.cuda.current_stream(device))
    return _streams[device]
