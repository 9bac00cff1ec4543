"""Writes good snapshots to disk, when the daemon says which: in a thread of low priority, beside the loop."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sentinel import wire
from sentinel.errors import RollbackError
from sentinel.hooks.core.identity import place
from sentinel.hooks.core.worker import Task, Worker
from sentinel.hooks.snapshot import checkpoint_files
from sentinel.hooks.snapshot import directory as snapshots
from sentinel.hooks.snapshot.capture import Part
from sentinel.hooks.snapshot.snapshot import Snapshot

CLOSING_SECONDS = 5.0
"""How long the end of the run waits for a write to notice that it is no longer wanted."""


class DiskWriter:
    """A rank's part in writing snapshots to `directory`. Rank 0 gives them their name, and deletes old ones."""

    def __init__(self, directory: str | os.PathLike[str], keep: int, first_step: int) -> None:
        """`first_step`: the user's number of the first step of this process. Raises RollbackError where the directory
        cannot be used, or holds snapshots of steps that this run has yet to make. Rank 0 alone looks at it, and makes
        it: where another rank does not see it, a file system may not be mounted there."""
        checkpoint_files.load_torch()
        self._place, self._keep, self._offset = Path(directory).absolute(), keep, first_step
        self._void_after: int | None = None
        """What is younger is to be set aside still: that failed when the run went back."""
        self._parent = -1
        if place()[0] == 0:
            self._parent = self._check_directory(first_step)
        self._worker = Worker("sentinel-disk")
        self._written: Task | None = None
        self._worker.start()
        self._writing: wire.Publish | None = None
        self._closed = False
        self._void = threading.Lock()

    def _check_directory(self, first_step: int) -> int:
        """The newest step that a snapshot is of; -1: there is none."""
        snapshots.directory(self._place, make=True)
        try:
            found = [(step, snapshots.read_manifest(path)) for step, path in snapshots.list_snapshots(self._place)]
        except OSError as error:
            raise RollbackError(f"{self._place}: cannot be read ({error.strerror})") from None
        for step, seen in reversed(found):
            if step < first_step:
                break
            if isinstance(seen, snapshots.Manifest):
                raise RollbackError(
                    f"{self._place}: holds a snapshot of step {step}, and this run begins at step {first_step}. "
                    "Go on from it, step = sentinel.resume(...) and attach(step=step), or name another directory"
                )
            if seen.state == "unreadable":
                raise RollbackError(f"{seen.why}: it is not known what is there; name another directory, or try again")
        ours = [step for step, seen in found if step < first_step and isinstance(seen, snapshots.Manifest)]
        return max(ours, default=-1)

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._writing is not None

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
            try:
                nbytes = self._write_snapshot(message, snapshot, parts)
            except checkpoint_files.Gone:
                ok, reason = False, "the snapshot is no longer wanted"
            except Exception as fault:
                ok, reason = False, str(fault) if isinstance(fault, RollbackError) else repr(fault)
            self._writing = None
            seconds = time.perf_counter() - started
            done(wire.Published(id=message.id, ok=ok, seq=message.seq, nbytes=nbytes, seconds=seconds, reason=reason))

        try:
            self._written = self._worker.submit(run)
        except (RuntimeError, MemoryError) as error:  # no thread
            self._writing = None
            done(wire.Published(id=message.id, ok=False, seq=message.seq, reason=repr(error)))

    def _write_snapshot(self, message: wire.Publish, snapshot: Snapshot, parts: Sequence[Part]) -> int:
        rank, world = place()
        if flaw := snapshot.flaw():
            raise RollbackError(flaw)
        folder = snapshots.working(snapshots.directory(self._place), message.step, message.id)

        def is_wanted() -> bool:
            return self._writing is message and not self._closed

        own = checkpoint_files.write(folder, snapshot.export_named(parts), rank=rank, world=world, wanted=is_wanted)
        if rank == 0:
            files = checkpoint_files.assemble(folder, world, is_wanted)
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
        )  # fmt: skip
        with self._void:  # a rollback must find it, or keep it from its name
            if not wanted():
                raise checkpoint_files.Gone
            self._set_aside()
            snapshots.publish(folder, manifest)
            self._parent = message.step
        snapshots.retain(self._place, self._keep)

    def rewound(self, to: int) -> None:
        """The run went back to `to`: what is younger is void. On the training thread; a rename each, on rank 0."""
        with self._void:
            if self._writing is not None and self._writing.seq > to:
                self._writing = None
            if place()[0] == 0:
                self._void_after = to + self._offset
                with contextlib.suppress(OSError):  # a file server's, of a moment; again before the next one is written
                    self._set_aside()

    def _set_aside(self) -> None:
        if self._void_after is not None:
            snapshots.set_aside(self._place, self._void_after)
            found = (step for step in snapshots.steps(self._place) if step <= self._void_after)
            self._parent, self._void_after = max(found, default=-1), None

    def close(self) -> None:
        """What is being written is left unfinished."""
        self._closed = True
        if self._written is not None:
            self._written.wait(CLOSING_SECONDS)
        self._worker.close()
