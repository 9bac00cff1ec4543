"""Writes good snapshots to disk, when the daemon says which: in a thread of low priority, beside the loop.

Over several nodes a part (`node_parts.py`) may be all that will ever exist of its step, so what is deleted depends on
what all nodes are known to hold (`CommonSnapshots`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch

from sentinel import wire
from sentinel.errors import RollbackError
from sentinel.hooks.core.identity import find_node, leads_node, place, spans_nodes
from sentinel.hooks.core.threads import Task, Worker, say_if_late
from sentinel.hooks.snapshot import checkpoint_files, node_parts
from sentinel.hooks.snapshot import directory as snapshots
from sentinel.hooks.snapshot.capture import Part
from sentinel.hooks.snapshot.snapshot import Snapshot

_LISTED = 64
"""Most steps that an answer to the daemon lists."""
CLOSING_SECONDS = 5.0
"""How long the end of the run waits for a write to notice that it is no longer wanted."""
AHEAD = 4
"""Parts that a node keeps beyond `disk_keep` as long as it does not know whether the others have theirs.

Of older parts it keeps a few (`CommonSnapshots`).
"""


_line = ""
_unfinished: tuple[Path, int] | None = None
"""The directory, and the step, of which the younger snapshots are still to be set aside; None: there are none."""


def begin_line(name: str, unfinished: tuple[Path, int] | None) -> None:
    """Begin a line of snapshots: what all ranks write from now on belongs together.

    Called once all ranks went on from one snapshot, or from the beginning. `unfinished`: that directory and step, if
    younger snapshots could not be set aside.
    """
    global _line, _unfinished
    _line, _unfinished = name, unfinished


def _is_ahead(manifest: snapshots.Manifest) -> bool:
    """Whether the snapshot is of another node that went on from the same one, and has come further already."""
    others = bool(manifest.ranks) and place()[0] not in manifest.ranks
    return others and bool(_line) and manifest.lineage.startswith(f"{_line}.")


class CommonSnapshots:
    """Tracks the steps whose snapshot all nodes hold, on the first rank of a node, and chooses which parts it keeps.

    The newest common one stays as long as the node writes at most `AHEAD` parts without news of the others. Beyond
    that, parts are thinned out: of the attempt's steps it keeps the newest two multiples of each power of two, about
    log2 of all that it wrote. So two nodes that write the same steps always have one in common. If a node writes only
    every 2^k-th step, that is its last one or the one before. If a node stopped n steps ago, it is one at most 2n steps
    older than its last: the least 2^j above n has a multiple among the stopped node's newest two that is still among
    the other's.
    """

    def __init__(self, step: int) -> None:
        """`step`: what all ranks went on from; negative: from nothing."""
        self._first = step + 1
        self._steps = {step}
        self._floor = -1

    def note(self, own: Collection[int], steps: Iterable[int], floor: int) -> None:
        """Note that all nodes hold these `steps`, and know that none needs a step older than `floor`.

        `floor` -1: that is not known. `own`: the steps that this node has. The news may be from before a rollback.
        """
        if floor in own:
            self._floor = max(self._floor, floor)
        self._steps = {step for step in (*self._steps, *steps) if step in own and step >= self._floor}

    def rewind(self, step: int) -> None:
        """Forget younger steps, as the run went back to this one: they are void."""
        self._steps = {one for one in self._steps if one <= step}
        self._floor = self._floor if self._floor <= step else -1

    def find_safe(self, keep: int) -> int:
        """Return the oldest of the newest `keep` that all nodes are known to hold; -1 if there are not as many."""
        newest = sorted(self._steps)[-keep:]
        return newest[0] if len(newest) == keep else -1

    def list_superfluous(self, line: Sequence[int], keep: int) -> list[int]:
        """List the steps to delete of the node's own `line`, the youngest first, of which `keep` are wanted."""
        rest = line[keep:]
        unknown = [step for step in rest if step >= self._floor and step not in self._steps]
        spread = self._list_spread(line)
        return [step for step in rest if step < self._floor] + [step for step in unknown[AHEAD:] if step not in spread]

    def _list_spread(self, line: Sequence[int]) -> set[int]:
        """List the newest two multiples of each power of two, counted from the attempt's first step, as on all
        nodes."""
        ordinals = [step - self._first for step in line if step >= self._first]
        spread = set()
        for bits in range(max(ordinals, default=0).bit_length() + 1):
            spread.update([one for one in ordinals if one % (1 << bits) == 0][:2])
        return {self._first + one for one in spread}


class DiskWriter:
    """A rank's part in writing snapshots to `directory`.

    Rank 0 names them, and deletes old ones; over several nodes the first rank of each does, in the node's own place.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, first_step: int) -> None:
        """Check the directory, and start the thread. `first_step`: the user's number of the first step of this process.

        Raises RollbackError if the directory cannot be used, or holds snapshots of steps that this run has yet to make.
        Only rank 0 looks at it, and makes it: where another rank does not see it, a file system may not be mounted
        there.
        """
        checkpoint_files.load_torch()
        self._directory, self._keep, self._offset = Path(directory).absolute(), keep, first_step
        self._place, self._leads = self._directory, place()[0] == 0
        if spans_nodes():
            self._leads = leads_node()
            self._place = node_parts.place_of(self._directory, place()[0])
        self._rewinds: list[int] = []
        """The seq of the snapshot of each rollback."""
        self._common = CommonSnapshots(first_step - 1)
        self._void_after = self._take_unfinished(first_step - 1)
        """The step whose younger snapshots are still to be set aside, as that failed when the run went back, or was
        resumed; None: done."""
        self._parent = -1
        if self._leads:
            with say_if_late(f"attach: reading {self._directory}", speaks=True):
                self._parent = self._check_directory(first_step)
        self._worker = Worker("sentinel-disk")
        self.written: Task | None = None
        """The last write, done or under way; None before the first."""
        self._worker.start()
        self._writing: wire.Publish | None = None
        self._closed = False
        self._void = threading.Lock()

    def _take_unfinished(self, step: int) -> int | None:
        """Return `step` if `resume` could not set aside what is younger. Once: what is written later is the run's."""
        global _unfinished
        if _unfinished != (self._directory, step):
            return None
        _unfinished = None
        return step

    def _check_directory(self, first_step: int) -> int:
        """Return the newest step before `first_step` that has a snapshot; -1 if there is none. Raises RollbackError."""
        snapshots.directory(self._directory, make=True)
        snapshots.directory(self._place, make=True)
        try:
            found = sorted(one for each in self._list_places() for one in snapshots.list_snapshots(each))
        except OSError as error:
            raise RollbackError(f"{self._directory}: cannot be read ({error.strerror})") from None
        for step, path in reversed(found):
            seen = snapshots.read_manifest(path)
            if step < first_step:
                if isinstance(seen, snapshots.Manifest):
                    return step
                continue
            if isinstance(seen, snapshots.Manifest):
                if _is_ahead(seen):
                    continue
                if self._void_after is not None:
                    continue
                raise RollbackError(
                    f"{self._directory}: holds a snapshot of step {step}, and this run begins at step {first_step}. "
                    "Go on from it, step = sentinel.resume(...) and attach(step=step), or name another directory"
                )
            if seen.state == "unreadable":
                raise RollbackError(f"{seen.why}: it is not known what is there; name another directory, or try again")
        return -1

    def _list_places(self) -> list[Path]:
        """List the directory, and the nodes' places in it, as far as they are seen here."""
        return [self._directory, *(each for _, each in node_parts.list_places(self._directory))]

    def publish(
        self,
        message: wire.Publish,
        snapshot: Snapshot,
        parts: Sequence[Part],
        done: Callable[[wire.Published], None],
    ) -> None:
        """Write a snapshot of these parts, which must not be overwritten until `done` is called."""
        self._writing = message

        def run() -> None:
            checkpoint_files.lower_priority()
            started = time.perf_counter()
            ok, reason, nbytes = True, "", 0
            kept: tuple[int, ...] = ()
            safe = -1
            try:
                nbytes = self._write_snapshot(message, snapshot, parts)
                if message.ranks and self._leads:
                    kept, safe = self._list_kept()[-_LISTED:], self._common.find_safe(self._keep)
            except checkpoint_files.Gone:
                ok, reason = False, "the snapshot is no longer wanted"
            except Exception as fault:
                ok, reason = False, str(fault) if isinstance(fault, RollbackError) else repr(fault)
            self._writing = None
            seconds = time.perf_counter() - started
            answer = wire.Published(
                id=message.id, ok=ok, seq=message.seq, nbytes=nbytes, seconds=seconds, reason=reason, kept=kept,
                safe=safe,
            )  # fmt: skip
            done(answer)
            if not ok and self._leads:  # a disk that was full for a moment would stay so
                shutil.rmtree(snapshots.working(self._place, message.step, message.id), ignore_errors=True)

        try:
            self.written = self._worker.submit(run)
        except (RuntimeError, MemoryError) as error:  # no thread can be started
            self._writing = None
            done(wire.Published(id=message.id, ok=False, seq=message.seq, reason=repr(error)))

    def _write_snapshot(self, message: wire.Publish, snapshot: Snapshot, parts: Sequence[Part]) -> int:
        rank, world = place()
        if flaw := snapshot.flaw():
            raise RollbackError(flaw)
        ranks = message.ranks or range(world)
        home = snapshots.directory(self._directory)
        if message.ranks:
            home = snapshots.directory(node_parts.place_of(home, ranks[0]))
            if self._leads != (rank == ranks[0]):
                raise RollbackError("LOCAL_RANK is not 0 on the first rank of this node alone")
        folder = snapshots.working(home, message.step, message.id)

        def is_wanted() -> bool:
            return self._writing is message and not self._closed

        named = snapshot.export_named(parts)
        own = checkpoint_files.write(folder, named, rank=rank, ranks=ranks, world=world, wanted=is_wanted)
        if self._leads:
            files = checkpoint_files.assemble(folder, ranks, is_wanted)
            self._publish(folder, message, world, files, is_wanted)
        return own

    def _publish(
        self,
        folder: Path,
        message: wire.Publish,
        world: int,
        files: dict[str, snapshots.File],
        wanted: Callable[[], bool],
    ) -> None:
        manifest = snapshots.Manifest(
            run=message.run, run_id=message.run_id, attempt=message.attempt, seq=message.seq, step=message.step,
            world_size=world, time=time.time(), torch=str(torch.__version__), files=files, parent=self._parent,
            ranks=message.ranks, node=find_node(place()[0]), lineage=self._find_lineage(message.seq),
        )  # fmt: skip
        with self._void:  # a rollback must find it, or keep it from being named
            if not wanted():
                raise checkpoint_files.Gone
            self._set_aside()
            snapshots.publish(folder, manifest)
            self._parent = message.step
        if not message.ranks:
            snapshots.retain(self._place, self._keep)
            return
        seen = node_parts.list_common(self._directory, world, self._keep)
        with self._void:
            own = self._list_kept()
            self._common.note(own, message.on_all, message.floor)
            self._common.note(own, seen, seen[self._keep - 1] if len(seen) >= self._keep else -1)
        snapshots.retain(self._place, self._keep, self._common.list_superfluous)

    def _find_lineage(self, seq: int) -> str:
        """Return the lineage of the snapshot of `seq`, by the rollbacks before it was taken.

        Those after it do not count: one node may write it before, and another after them.
        """
        before = next((count for count, to in reversed([*enumerate(self._rewinds, 1)]) if seq > to), 0)
        return f"{_line}.{before}"

    def _list_kept(self) -> tuple[int, ...]:
        """List the steps of which this node has a part."""
        return tuple(sorted(snapshot.step for snapshot in snapshots.list_published(self._place)))

    def give_up(self, order: int | None = None) -> None:
        """Give up the write of the order with this id, whose parts this rank would wait for: another rank has none.

        None: give up any, since the daemon has ordered another.
        """
        writing = self._writing
        if writing is not None and order in (None, writing.id):
            self._writing = None

    def rewound(self, to: int) -> None:
        """Void what is younger than `to`, as the run went back to it. On the training thread; on rank 0 a rename for
        each."""
        doing = f"rollback: setting aside what is younger in {self._place}"
        with say_if_late(doing, speaks=self._leads), self._void:
            if self._writing is not None and self._writing.seq > to:
                self._writing = None
            self._rewinds.append(to)
            if self._leads:
                step = to + self._offset
                # What an earlier one undid stays void, even if this one goes less far back: nothing was written since.
                self._void_after = step if self._void_after is None else min(step, self._void_after)
                self._common.rewind(self._void_after)
                with contextlib.suppress(OSError):  # a passing error of a file server: done again before the next write
                    self._set_aside()

    def _set_aside(self) -> None:
        if self._void_after is not None:
            snapshots.set_aside(self._place, self._void_after)
            found = (step for each in self._list_places() for step in snapshots.steps(each) if step <= self._void_after)
            self._parent, self._void_after = max(found, default=-1), None

    def close(self) -> None:
        """Stop; what is being written is left unfinished."""
        self._closed = True
        if self.written is not None:
            self.written.wait(CLOSING_SECONDS)
        self._worker.close()
