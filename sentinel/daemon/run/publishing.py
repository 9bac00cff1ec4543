"""Decides which snapshots the ranks write to disk: at intervals, good ones that all ranks hold.

A snapshot is good once the run stayed healthy for `margin` steps after it: what is written is what a rollback would
restore now, so that a job that is started again does not begin with the fault that ended it.

In a job over several nodes each node has its own ranks write, without asking the others: all choose from the same
steps, and a snapshot counts once all nodes have their part. So it was good by the signs of every node.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable

import msgspec

from sentinel import wire
from sentinel.cluster.protocol.disk import NodeDisk
from sentinel.daemon.run.context import RunContext
from sentinel.runs import Attempt

PATIENCE_STEPS = 10_000
"""Steps after which an answer is no longer expected: a rank was lost while it wrote."""


class Publishing:
    """Directs the writing for one attempt."""

    def __init__(self, context: RunContext, disk: NodeDisk | None = None) -> None:
        """`disk`: the snapshot parts on this node's disk, if the run has ranks on other nodes."""
        self._context, self._attempt, self.disk = context, context.run.attempt, disk
        self._ids = itertools.count(1 + secrets.randbelow(1 << 30))
        self._asked: wire.Publish | None = None
        self._answers: dict[int, wire.Published] = {}
        self._asked_at = 0
        self._stride = 1
        """With several nodes, one of this many due snapshots is written. A power of two, so that a node where writing
        takes longer writes some of the snapshots that the others write, too."""
        self._told: set[str] = set()
        self.last = -1
        """Seq of the newest snapshot that was tried."""
        self.written: int | None = None
        """Seq of the newest snapshot known to be on disk."""

    def find_due(self, terms: wire.RollbackTerms | None, closed: int) -> int | None:
        """Return the seq from which on a snapshot is due for writing, if the ranks hold one; otherwise None.

        `closed`: the last judged step.
        """
        if terms is None or not terms.disk_every or not self._has_all_ranks() or self._waiting(closed):
            return None
        due = self._find_next(terms.every * terms.disk_every) if self.last >= 0 else 0
        return due if max(self._attempt.held, default=-1) >= due else None

    def choose(self, good: Iterable[int], terms: wire.RollbackTerms | None) -> int | None:
        """Return the newest good snapshot that may be written; with several nodes, of those that all choose from."""
        if self.disk is None or terms is None:
            return max(good, default=None)
        spacing = terms.every * terms.disk_every * self._stride
        return max((seq for seq in good if seq % spacing == 0), default=None)

    def order(self, seq: int) -> None:
        """Tell the ranks to write the snapshot of this step."""
        self._asked, self._answers, self._asked_at = self._message(seq, self._attempt), {}, self._attempt.closed_to
        for rank in self._attempt.live:
            self._context.link.send(rank.identity.rank, self._asked)

    def add_part(self, rank: int, answer: wire.Published) -> tuple[int, float, int] | None:
        """Take a rank's answer: it wrote its part, or failed. Returns (seq, seconds, bytes) once all are on disk."""
        if self._asked is None or answer.id != self._asked.id:
            return None
        self._answers[rank] = answer
        failed = next((answer for answer in self._answers.values() if not answer.ok), None)
        if failed is not None:
            self._asked = None
            for other in self._attempt.live:  # otherwise they wait for that part, and cannot write the next snapshot
                if other.identity.rank not in self._answers:
                    self._context.link.send(other.identity.rank, wire.CancelPublish(id=answer.id))
            self.last = max(self.last, answer.seq)  # so that it is not tried again at every step
            if failed.reason not in self._told:
                self._told.add(failed.reason)
                step = answer.seq + self._attempt.step_offset
                self._context.tell(f"the snapshot of step {step} was not written to disk: {failed.reason}")
            return None
        if len(self._answers) < len(self._attempt.live):
            return None
        self._asked, self.last, self.written = None, answer.seq, answer.seq
        if self.disk is not None:
            first = max(self._answers.values(), key=lambda one: len(one.kept))
            self.disk.kept, self.disk.safe = first.kept, first.safe
            self._set_stride(self._attempt.closed_to - self._asked_at)
        answers = self._answers.values()
        return answer.seq, max(one.seconds for one in answers), sum(one.nbytes for one in answers)

    def rewind(self, to: int) -> None:
        """Discard snapshots younger than `to`, on disk too: the run was rolled back to it."""
        self.last = min(self.last, to)
        if self.written is not None and self.written > to:
            self.written = None
        if self.disk is not None:
            self.disk.rewind(to + self._attempt.step_offset)

    def _find_next(self, spacing: int) -> int:
        if self.disk is None:
            return self.last + spacing
        spacing *= self._stride
        return (self.last // spacing + 1) * spacing

    def _set_stride(self, steps: int) -> None:
        """Set the stride after a snapshot that took this many steps to write."""
        terms = self._attempt.live[0].hello.rollback if self._attempt.live else None
        if terms is not None:
            needed = steps // max(terms.every * terms.disk_every, 1)
            self._stride = 1 << needed.bit_length()

    def _has_all_ranks(self) -> bool:
        """Whether all ranks that write together are connected."""
        live = self._attempt.live
        if self.disk is None or not live:
            return self._attempt.complete
        return len(live) == live[0].identity.local_world_size and all(rank.hello.writes_parts for rank in live)

    def _waiting(self, closed: int) -> bool:
        return self._asked is not None and closed < self._asked.seq + PATIENCE_STEPS

    def _message(self, seq: int, attempt: Attempt) -> wire.Publish:
        message = wire.Publish(
            id=next(self._ids), seq=seq, step=seq + attempt.step_offset, run=self._context.run.name,
            run_id=self._context.run.run_id, attempt=attempt.number,
        )  # fmt: skip
        if self.disk is None:
            return message
        ranks = tuple(sorted(rank.identity.rank for rank in attempt.live))
        return msgspec.structs.replace(message, ranks=ranks, on_all=self.disk.on_all, floor=self.disk.floor)
