"""Says which snapshots the ranks write to disk: good ones, which all of them hold, every so often.

A snapshot is good once the run stayed healthy for `margin` steps after it: what is written is what a rollback would go
back to now, so that a job that is started again does not begin with the fault that ended it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

from sentinel import wire
from sentinel.runs import Attempt, Run

PATIENCE_STEPS = 10_000
"""After which an answer is not waited for any more: a rank was lost while it wrote."""


class Publishing:
    """Of one attempt."""

    def __init__(self, run: Run, send: Callable[[int, wire.Message], None], tell: Callable[[str], None]) -> None:
        """`tell` prints a line on the training terminal."""
        self._run, self._attempt, self._send, self._tell = run, run.attempt, send, tell
        self._ids = itertools.count(1 + secrets.randbelow(1 << 30))
        self._asked: wire.Publish | None = None
        self._answers: dict[int, wire.Published] = {}
        self._told: set[str] = set()
        self.last = -1
        """Seq of the newest one on disk, as far as is known here."""

    def advance(self, terms: wire.RollbackTerms | None, closed: int, healthy: Callable[[], bool]) -> None:
        """Steps up to `closed` were judged: have the newest good snapshot written, if it is time."""
        if terms is None or not terms.disk_every or not self._attempt.complete or self._waiting(closed):
            return
        good = max((seq for seq in self._attempt.held if seq + terms.margin <= closed), default=-1)
        if good < 0 or (self.last >= 0 and good < self.last + terms.every * terms.disk_every):
            return
        if not healthy():
            return
        self._asked, self._answers = self._message(good, self._attempt), {}
        for rank in self._attempt.live:
            self._send(rank.identity.rank, self._asked)

    def published(self, rank: int, answer: wire.Published) -> tuple[int, float, int] | None:
        """A rank wrote its part, or did not. (seq, seconds, bytes) once all have, and it is on disk."""
        if self._asked is None or answer.id != self._asked.id:
            return None
        self._answers[rank] = answer
        failed = next((answer for answer in self._answers.values() if not answer.ok), None)
        if failed is not None:
            self._asked = None
            self.last = max(self.last, answer.seq)  # not at every step again
            if failed.reason not in self._told:
                self._told.add(failed.reason)
                step = answer.seq + self._attempt.step_offset
                self._tell(f"the snapshot of step {step} was not written to disk: {failed.reason}")
            return None
        if len(self._answers) < len(self._attempt.live):
            return None
        self._asked, self.last = None, answer.seq
        answers = self._answers.values()
        return answer.seq, max(one.seconds for one in answers), sum(one.nbytes for one in answers)

    def rewound(self, to: int) -> None:
        """The run went back to `to`: what is younger is void, on disk too."""
        self.last = min(self.last, to)

    def _waiting(self, closed: int) -> bool:
        return self._asked is not None and closed < self._asked.seq + PATIENCE_STEPS

    def _message(self, seq: int, attempt: Attempt) -> wire.Publish:
        return wire.Publish(
            id=next(self._ids), seq=seq, step=seq + attempt.step_offset, run=self._run.name, run_id=self._run.run_id,
            attempt=attempt.number,
        )  # fmt: skip
