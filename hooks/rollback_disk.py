"""Writes good snapshots to disk, when the daemon says which: in a thread of low priority, beside the loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sentinel import snapshots, wire
from sentinel.errors import RollbackError
from sentinel.hooks import snapshot_disk as disk
from sentinel.hooks.identity import place
from sentinel.hooks.snapshot import Snapshot
from sentinel.hooks.snapshot_capture import Part

CLOSING_SECONDS = 5.0
"""How long the end of the run waits for a write to notice that it is not wanted any more."""


class Publisher:
    """A rank's part in writing snapshots to `directory`. Rank 0 gives them their name, and deletes old ones."""

    def __init__(self, directory: str | os.PathLike[str], keep: int, first_step: int) -> None:
        """`first_step`: the user's number of the first step of this process. Raises RollbackError where the directory
        cannot be used, or holds snapshots of steps that this run has yet to make."""
        disk.load_torch()
        self._place, self._keep, self._offset = snapshots.directory(directory, make=True), keep, first_step
        self._thread: threading.Thread | None = None
        self._writing: wire.Publish | None = None
        self._closed = False
        self._void = threading.Lock()
        if (ahead := [step for step in snapshots.steps(self._place) if step >= first_step]) and place()[0] == 0:
            raise RollbackError(
                f"{self._place}: holds a snapshot of step {ahead[-1]}, and this run begins at step {first_step}. Go on "
                "from it, step = sentinel.resume(...) and attach(step=step), or name another directory"
            )

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
        """Write a snapshot of these parts, which nobody overwrites till `done` is called."""
        self._writing = message

        def run() -> None:
            disk.lower_priority()
            started = time.perf_counter()
            ok, reason, nbytes = True, "", 0
            try:
                nbytes = self._written(message, snapshot, parts)
            except disk.Gone:
                ok, reason = False, "the snapshot is not wanted any more"
            except Exception as fault:
                ok, reason = False, str(fault) if isinstance(fault, RollbackError) else repr(fault)
            self._writing = None
            seconds = time.perf_counter() - started
            done(wire.Published(id=message.id, ok=ok, seq=message.seq, nbytes=nbytes, seconds=seconds, reason=reason))

        self._thread = threading.Thread(target=run, name="sentinel-disk", daemon=True)
        self._thread.start()

    def _written(self, message: wire.Publish, snapshot: Snapshot, parts: Sequence[Part]) -> int:
        rank, world = place()
        if flaw := snapshot.flaw():
            raise RollbackError(flaw)
        folder = snapshots.working(self._place, message.step, message.id)

        def wanted() -> bool:
            return self._writing is message and not self._closed

        own = disk.write(folder, snapshot.named(parts), rank=rank, world=world, wanted=wanted)
        if rank == 0:
            files = disk.assemble(folder, world, wanted)
            self._publish(folder, message, world, files, wanted)
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
            world_size=world, time=time.time(), torch=str(torch.__version__), files=files,
        )  # fmt: skip
        with self._void:  # a rollback must find it, or keep it from its name
            if not wanted():
                raise disk.Gone
            snapshots.publish(folder, manifest)
        snapshots.retain(self._place, self._keep)

    def rewound(self, to: int) -> None:
        """The run went back to `to`: what is younger is void. On the training thread; a rename each, on rank 0."""
        with self._void:
            if self._writing is not None and self._writing.seq > to:
                self._writing = None
            if place()[0] == 0:
                snapshots.void(self._place, to + self._offset)

    def close(self) -> None:
        """What is being written is left unfinished."""
        self._closed = True
        if self._thread is not None:
            self._thread.join(CLOSING_SECONDS)
