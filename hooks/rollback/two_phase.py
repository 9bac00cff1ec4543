"""A rank's side of the agreement to roll back: all ranks at the exit of the same step, or none.

    daemon -> Prepare(id, at, to)     each rank binds itself to stop at the exit of step `at`, or says it is late
    daemon -> Commit(id)              all did: restore
              Abort(id)               not all did: go on as if nothing had been asked

It costs the loop one comparison a step. Without the promise, ranks that are a step apart would restore at different
steps and then wait for each other without end in a collective.
"""

from __future__ import annotations

import threading

from sentinel import wire

NOWHERE = -1


class TwoPhaseCommit:
    """At most one at a time. `prepare` and `decide` are called by the thread that receives, the rest by the loop."""

    def __init__(self) -> None:
        self.exited = NOWHERE
        """The last step whose exit was reached."""
        self._target = NOWHERE
        self._prepare: wire.Prepare | None = None
        self._in_time = False
        """It was answered that it can be kept."""
        self._verdict: wire.Commit | None = None
        self._changed = threading.Condition()

    @property
    def bound(self) -> bool:
        """Whether there is one."""
        return self._prepare is not None

    @property
    def id(self) -> int:
        """Its id; 0: there is none."""
        prepare = self._prepare
        return prepare.id if prepare is not None else 0

    def prepare(self, message: wire.Prepare) -> wire.Prepared:
        """Bind this rank; the answer. A refusal without a reason: the step is over already, ask for a later one."""
        with self._changed:
            if self._prepare is not None:
                reason = f"bound to rollback {self._prepare.id} already"
                return wire.Prepared(id=message.id, ok=False, seq=self.exited, reason=reason)
            self._prepare, self._verdict, self._in_time = message, None, False
        # The order decides. Here the target is written and then `exited` is read; `reached` writes `exited` and then
        # reads the target. Whatever the interleaving, one of the two sees what the other wrote: a rank that is told
        # here that it is in time can't run past `at` unseen. Were `exited` read first, the loop could pass between.
        self._target = message.at
        in_time = self._in_time = self.exited < message.at
        if not in_time:
            self._release(message.id)  # the loop may have seen the target at the last moment, and be waiting
        return wire.Prepared(id=message.id, ok=in_time, seq=self.exited)

    def decide(self, verdict: wire.Commit | wire.Abort) -> bool:
        """Hand over the verdict; whether it was still waited for."""
        if isinstance(verdict, wire.Abort):
            return self._release(verdict.id)
        with self._changed:
            if self._prepare is None or self._prepare.id != verdict.id:
                return False
            self._verdict = verdict
            self._changed.notify_all()
            return True

    def reach_step(self, seq: int) -> bool:
        """The loop is at the exit of step `seq`: whether it must wait there, or should have before."""
        self.exited = seq
        return NOWHERE < self._target <= seq

    @property
    def missed(self) -> wire.Prepare | None:
        """One that could be kept and whose step went by: an interrupt from the keyboard took its exit away."""
        mine = self._prepare
        return mine if mine is not None and self._in_time and mine.at < self.exited else None

    @property
    def due(self) -> wire.Prepare | None:
        """One whose step it is."""
        mine = self._prepare
        return mine if mine is not None and mine.at == self.exited else None

    def break_off(self, promise: wire.Prepare) -> None:
        """It will not be kept."""
        self._release(promise.id)

    def wait(self, seconds: float) -> tuple[wire.Prepare | None, wire.Commit | None]:
        """At the promised step, wait for the verdict. (promise, None) is the time-out, (None, None) an abort."""
        with self._changed:
            mine = self._prepare
            # Since `reached` looked, what was promised may have been aborted and a later step promised instead.
            if mine is None or mine.at != self.exited:
                return None, None
            self._changed.wait_for(lambda: self._prepare is not mine or self._verdict is not None, seconds)
            if self._prepare is not mine:
                return None, None
            verdict = self._verdict
            self._clear()
            return mine, verdict

    def _release(self, promise: int) -> bool:
        with self._changed:
            if self._prepare is None or self._prepare.id != promise:
                return False
            self._clear()
            self._changed.notify_all()
            return True

    def _clear(self) -> None:
        self._prepare, self._verdict, self._target = None, None, NOWHERE
