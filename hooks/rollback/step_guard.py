"""Does what all ranks agreed on at the exit of a step: here, to leave the run. `restorer.py` adds going back.

    Prepare, Commit, Abort        as for a rollback (agreement.py): all ranks leave at the exit of one step, or none
    RolledBack                    the daemon learns that they do; from here on nothing counts as a hang
    functions of on_stop          on the training thread of every rank, so that collectives work in them
    the other ranks               are waited for: a launcher ends the remaining ranks as soon as one has gone
    RunStopped                    a SystemExit: the script's `finally` blocks run, and the process ends

What a function raises is printed, and changes nothing. If all of this takes over 10 minutes, a thread ends the process
with the same status.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sentinel import wire
from sentinel.errors import EXIT_BY_RULE, RunStopped
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import defer_signals
from sentinel.hooks.core.identity import place
from sentinel.hooks.core.threads import start_thread
from sentinel.hooks.rollback.agreement import NOWHERE, InDoubt, RankConsensus, TwoPhaseCommit
from sentinel.text import write_lines

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 10.0
"""How long a rank waits at the agreed step. The daemon answers in milliseconds; if it is dead, training goes on."""
LAST_SECONDS = 600.0
"""Time for the functions of `on_stop` and for the other ranks, unless the user sets another."""

LastFunction = Callable[[int], object]


class GuardSession(Protocol):
    """What the guard needs of `session.RunSession`."""

    def send(self, message: wire.FromRank) -> None:
        """Send a message to the daemon."""

    def find_directory(self) -> Path | None:
        """Return the run's runtime directory; None as long as it is not known."""

    def begin_stop(self) -> None:
        """Begin the phase after training: time that passes in it is no hang."""

    def say_goodbye(self, stop: RunStopped) -> None:
        """Tell the daemon at once, on any thread, that the process is about to be ended."""


class StepGuard:
    """Keeps a rank's promises at the exits of steps. Only RunStopped ever reaches the loop.

    The loop calls `enter_step` and `exit_step`, the receiver `receive`.
    """

    def __init__(
        self,
        session: GuardSession,
        *,
        step: int = 0,
        verdict_seconds: float = VERDICT_SECONDS,
    ) -> None:
        """`step`: the user's number of the first step."""
        self.last_functions: list[tuple[LastFunction, float]] = []
        """The user's functions for a stop, each with its seconds. They may hold the model, and die with the
        optimizer."""
        self._session, self._step = session, step
        self._verdict_seconds = verdict_seconds
        self._promise = TwoPhaseCommit()
        self._consensus = RankConsensus(verdict_seconds, session.find_directory)
        self._step_seconds, self._exited = 0.0, 0.0
        self._stop: RunStopped | None = None
        self._leaving: wire.Prepare | None = None
        """The promise by which all ranks leave, until this one has done what comes before its end."""
        self._closed = ""

    @property
    def promised(self) -> int:
        """Id of the promise that waits for a verdict; 0: none."""
        return self._promise.id

    # Called by the loop.

    def enter_step(self, seq: int) -> None:
        """Called first in the first optimizer's step."""

    def suspect(self) -> None:
        """Note that this step looks odd."""

    def pause(self) -> None:
        """Prepare for the capture of a CUDA graph."""

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        """Called last in the step. Raises RunStopped if all ranks leave."""
        self._note_exit()
        if self._promise.reach_step(seq):
            self._keep_promise()
        self._raise_if_stopped(seq)

    def _note_exit(self) -> None:
        now = time.monotonic()
        self._step_seconds, self._exited = (now - self._exited if self._exited else 0.0), now

    def _raise_if_stopped(self, seq: int) -> None:
        if self._stop is None:
            return
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            faults.say(f"the run is stopped at step {seq + self._step}: {self._stop.reason}")
        else:
            with faults.swallow_faults("the end of a stopped run", "which ends all the same"):
                self._leave(leaving, self._stop)
        raise self._stop

    def _keep_promise(self) -> None:
        if (missed := self._promise.missed) is not None:
            self._go_on(missed, "its exit was interrupted")
            return
        due = self._promise.due
        try:
            promise, verdict = self._promise.wait(self._verdict_seconds)
        except BaseException:
            if due is not None:
                self._go_on(due, "the wait for the verdict was interrupted")
            raise
        if promise is not None and verdict is None:
            self._go_on(promise, f"no verdict within {self._verdict_seconds:g} s: went on without")
        elif promise is not None and verdict is not None:
            with defer_signals():
                self._session.send(self._carry_out(promise, verdict))

    def _go_on(self, promise: wire.Prepare, reason: str) -> None:
        """Go on as if nothing had been asked: then no rank does what was promised."""
        self._promise.break_off(promise)
        self._consensus.withhold(promise)
        logger.warning("%s at step %d: %s", "stop" if promise.stops else "rollback", promise.at, reason)
        self._session.send(
            wire.RolledBack(id=promise.id, ok=False, to=promise.to, at=promise.at, seconds=0.0, reason=reason)
        )

    def _carry_out(self, promise: wire.Prepare, verdict: wire.Commit) -> wire.RolledBack:
        """Leave if all ranks do, as the commit of a stop is there."""
        began = time.perf_counter()
        in_doubt = False
        try:
            reason = self._consensus.ask_ranks(promise, True, self._step_seconds)
        except InDoubt as error:
            reason, in_doubt = f"the other ranks may have left or not: {error}", True
        if not reason or in_doubt:
            self._stop, self._leaving = RunStopped(verdict.reason, EXIT_BY_RULE), promise
        return wire.RolledBack(
            id=promise.id, ok=not reason, to=NOWHERE, at=promise.at, seconds=time.perf_counter() - began,
            reason=reason, touched=in_doubt,
        )  # fmt: skip

    def _leave(self, promise: wire.Prepare, stop: RunStopped) -> None:
        """Do what comes between the last step and the end of the process."""
        step = promise.at + self._step
        seconds = max((limit for _, limit in self.last_functions), default=LAST_SECONDS)
        until = time.monotonic() + seconds
        if place()[0] == 0:
            faults.say(f"the run is stopped at step {step}, on all ranks, with exit code {stop.status}: {stop.reason}")
        self._session.begin_stop()
        watchdog = threading.Timer(seconds, self._end_process, (stop, seconds))
        watchdog.daemon = True
        with faults.swallow_faults("the limit of on_stop", "without it"):
            start_thread(watchdog)
        for function, _ in self.last_functions:
            _call_last(function, step)
        watchdog.cancel()
        self._consensus.await_ranks(promise, until - time.monotonic())

    def _end_process(self, stop: RunStopped, seconds: float) -> None:
        """End the process, on a separate thread: the training thread does not come back."""
        faults.say(f"on_stop took over {seconds:g} s on rank {place()[0]}: the process is ended")
        self._session.say_goodbye(stop)
        os._exit(stop.status)

    # Called by the receiver.

    def receive(self, message: wire.Message) -> None:
        """Handle a message from the daemon, if it is for this part."""
        match message:
            case wire.Prepare():
                if (answer := self._prepare_answer(message)) is not None:
                    self._session.send(answer)
            case wire.Commit() | wire.Abort():
                self._promise.decide(message)
            case wire.Stop():
                self._stop = RunStopped(message.reason)

    def _prepare_answer(self, message: wire.Prepare) -> wire.Prepared | None:
        reason = self._closed or self._find_hindrance(message) or self._consensus.impossible()
        if reason:
            return wire.Prepared(id=message.id, ok=False, seq=self._promise.exited, reason=reason)
        return self._promise.prepare(message)

    def _find_hindrance(self, message: wire.Prepare) -> str:
        """Return why this rank cannot do what it would promise; empty if it can."""
        return "" if message.stops else "no rollback is armed"

    def close(self) -> None:
        """Refuse promises from now on: there will be no more steps."""
        self._closed = "the run is detached"
        self._consensus.close()


def _call_last(function: LastFunction, step: int) -> None:
    try:
        function(step)
    except BaseException:  # the stop ends the run, whatever this raises
        write_lines(f"sentinel: on_stop: {function!r} raised\n{traceback.format_exc()}", sys.stderr)
