"""Rollback in the training process: keeps snapshots, and restores one at the exit of a step.

    monitor = sentinel.attach(model, optimizer, rollback=sentinel.Rollback(every=200, keep=2, margin=100))

The daemon decides; the rank keeps snapshots, promises a step and restores. Everything runs inside the user's
`optimizer.step()`, so the loop needs no code for it: it goes on with the batches that follow, its own step counter does
not rewind, and schedulers and loss scaler, which run after the step, find what they found then.

Gradients of the step that is undone are set to zero in place. A loop that zeroes them, at the start or the end, does
that anyway; one that accumulates them goes on from zero; code that looks at them after the step finds tensors, not
None. A second optimizer that steps later in the same iteration sees zeros too: it moves by its momentum and decay at
most.

Optimizers that step in the backward pass are noticed at their first such step; rollback is then disarmed, with a line
on the terminal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from sentinel import wire
from sentinel.errors import RollbackError, RunStopped
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import Unseen, is_passing
from sentinel.hooks.core.identity import neighbours
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.rollback.agreement import NOWHERE, InDoubt
from sentinel.hooks.rollback.disk_writer import DiskWriter
from sentinel.hooks.rollback.lr_scaling import LoweredRates
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.step_guard import VERDICT_SECONDS, GuardSession, StepGuard
from sentinel.hooks.snapshot.capture import Stateful, check_plain
from sentinel.hooks.snapshot.host_buffer import Budget, estimate_bytes
from sentinel.hooks.snapshot.parts import RunState
from sentinel.hooks.snapshot.snapshot import Ring, Snapshot
from sentinel.hooks.snapshot.state_owners import Owners

logger = logging.getLogger(__name__)

SUSPICION_SECONDS = 0.5
"""Time of five batches on the wire: the daemon's `Withhold` or `Prepare` has arrived by then, or it saw nothing."""
_SNAPSHOTS = "snapshots for rollback"
"""What is reported as not available for a while."""


class RestorerSession(GuardSession, Protocol):
    """What the restorer needs of `session.RunSession`."""

    @property
    def unseen(self) -> Unseen:
        """Records what fails in our hooks."""

    @property
    def batches(self) -> Batches | None:
        """Skips batches after a rollback."""

    @property
    def is_cut_off(self) -> bool:
        """Whether no daemon judges the steps at present."""

    def defer(self, method: Callable[[], None]) -> None:
        """Call `method` once the loop is done with the present iteration, if that is seen before the next step."""

    def disarm(self, reason: str) -> None:
        """Report that rollback ends by itself."""


class Restorer(StepGuard):
    """Takes snapshots and goes back to them. The loop calls `enter_step` and `exit_step`, the receiver `receive`.

    A fault of our own disarms it, with one line in the log; only RunStopped ever reaches the loop.
    """

    def __init__(
        self,
        terms: Rollback,
        *,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any = None,
        schedulers: Sequence[Stateful] | None = None,
        given: Sequence[Any] = (),
        session: RestorerSession,
        step: int = 0,
        verdict_seconds: float = VERDICT_SECONDS,
    ) -> None:
        """Check that the snapshots fit into memory, and that all of the run's state can be captured.

        `scaler` and `schedulers` are found where they are None; `given`: the optimizers, in their wrappers; `step`: the
        user's number of the first step. Raises RollbackError if the snapshots would not fit into memory, or cannot be
        kept on disk; StateError if something cannot be captured.
        """
        super().__init__(session, step=step, verdict_seconds=verdict_seconds)
        self._session: RestorerSession = session
        self.functions: list[Callable[[int, int], object]] = []
        """The user's functions to call after a restore. They may hold the model, and die with the optimizer as this
        does."""
        self.terms = terms
        self._every = terms.every
        owners = Owners(
            models, optimizers, given=given, scaler=scaler, scheduler=schedulers, taken=[*terms.state.values()]
        )
        if owners.ambiguous and terms.directory is not None:
            raise RollbackError(
                f"rollback: nothing tells the {owners.ambiguous}s of one optimizer apart, and on disk each needs its "
                "own name: give them in an order, attach(scheduler=[...])"
            )
        self._run = RunState(models, optimizers, owners, terms.state)
        for parameter, name in self._run.weights.live().values():
            check_plain(name, parameter)
        self._run.check_models()
        self._run.check_optimizers()
        self._optimizers, self._checked = optimizers, False
        parameters = [parameter for parameter, _ in self._run.weights.live().values()]
        afford = Budget(terms.keep)
        extra = self._run.read_given()
        buffers = [buffer for *_, buffer in self._run.buffers.live()]
        size = estimate_bytes([*parameters, *buffers], optimizers, extra)
        twice = self._run.settles_late and terms.directory is not None
        afford.expect(size * 2 if twice else size, neighbours())
        self.disk = DiskWriter(terms.directory, terms.disk_keep, step) if terms.directory is not None else None
        """Writes snapshots to disk; None where the terms name no directory."""
        self._unseen = session.unseen
        self.ring = Ring(self._run, keep=terms.keep, margin=terms.margin, afford=afford, unseen=self._unseen)
        """The snapshots in host memory."""
        self._rates = LoweredRates(optimizers, self._unseen)
        self._ring_lock = threading.Lock()
        self._unhealthy_until = NOWHERE
        self._suspected_until = self._no_snapshot_until = self._taken_at = 0.0
        self._retake_torn = False
        self._unreported_void: tuple[int, ...] = ()
        self._fault = ""

    @property
    def held(self) -> tuple[int, ...]:
        """Sequence numbers of the complete snapshots."""
        return self.ring.held

    # Called by the loop.

    def enter_step(self, seq: int) -> None:
        """Called first in the first optimizer's step, before it changes anything."""
        try:
            if self.disk is not None:
                self._copy_late_state()
            self._rates.lower()
            if self.ring.copying:
                self._complete_copy()
        except Exception as fault:
            self._fail(fault)

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        """Called last in the step, or in the scaler's if it withheld the step: then there was no `enter_step`.

        Raises RunStopped if the daemon said so, or if all ranks leave.
        """
        try:
            self._note_exit()
            self._rates.put_back()
            if skipped and self.disk is not None:
                self._copy_late_state()
            if skipped and self.ring.copying:
                self._complete_copy()
            if self._promise.reach_step(seq):
                self._keep_promise()
            elif (seq % self._every == 0 or self._retake_torn) and self._may_take(seq) and not self._fault:
                self._take(seq)
        except Exception as fault:
            self._fail(fault)
        self._raise_if_stopped(seq)

    def pause(self) -> None:
        """Finish a copy that is under way, and what is still to be copied for the disk, before a CUDA graph is
        captured."""
        try:
            if self.ring.copying:
                self._complete_copy()
            if self.disk is not None:
                self.ring.finish()
        except Exception as fault:
            self._fail(fault)

    def suspect(self) -> None:
        """Note that the hooks saw something odd. At most one new snapshot is taken until the daemon has had time to
        judge.

        In a loop of 1 ms steps, the ring would be full of broken snapshots before the daemon's word arrives. One is no
        harm: it replaces no good one. Without it, one hard batch on one of many ranks would cost all of them the
        snapshot of that step.
        """
        self._suspected_until = time.monotonic() + SUSPICION_SECONDS

    def _may_take(self, seq: int) -> bool:
        paused = self._unseen.pausing and self._unseen.is_paused(_SNAPSHOTS)
        now = time.monotonic()
        if self._session.is_cut_off:  # steps are not judged: by age alone snapshots of a fault would pass for good ones
            self.suspect()
            return False
        suspicious = now <= self._suspected_until and now <= self._taken_at + SUSPICION_SECONDS
        return seq > self._unhealthy_until and now > self._no_snapshot_until and not suspicious and not paused

    def _take(self, seq: int) -> None:
        with self._ring_lock:  # a snapshot that is being given up must not be promised
            if self._promise.bound:
                return
            void = self.ring.make_room(seq)
        if void is None:  # one is being written to disk, the other is the good one
            return
        self._unreported_void += void
        self._retake_torn = False
        self._taken_at = time.monotonic()
        self._check_once()
        self._report(self.ring.begin(seq))
        if self.disk is not None:
            self._session.defer(self._copy_late_state)

    def _check_once(self) -> None:
        """Check, once the optimizers have made their state, that all of it can be captured."""
        if not self._checked and all(optimizer.state for optimizer in self._optimizers):
            self._checked = True
            self._run.check_optimizers()

    def _copy_late_state(self) -> None:
        """Copy what the loop changes after the step. Called between the steps too, where nothing of ours may raise."""
        try:
            self.ring.finish()
        except Exception as fault:
            self._fail(fault)

    def _complete_copy(self) -> None:
        complete, torn = self.ring.settle()
        self._report(complete)
        self._retake_torn = torn

    def _report(self, complete: Snapshot | None) -> None:
        if complete is None:
            return
        self._unseen.restore(_SNAPSHOTS)
        void, self._unreported_void = self._unreported_void, ()
        taken = wire.SnapshotTaken(
            seq=complete.seq, nbytes=complete.nbytes, seconds=complete.seconds, time=time.time(), void=void
        )
        self._session.send(taken)

    def _carry_out(self, promise: wire.Prepare, verdict: wire.Commit) -> wire.RolledBack:
        return super()._carry_out(promise, verdict) if promise.stops else self._restore_promised(promise, verdict)

    def _restore_promised(self, promise: wire.Prepare, verdict: wire.Commit) -> wire.RolledBack:
        started = time.perf_counter()
        void: tuple[int, ...] = ()
        ok = touched = flawed = False
        try:
            snapshot, flaw = self._find_usable(promise.to)
            flawed = bool(flaw)
            decided = self._consensus.ask_ranks(promise, not flaw, self._step_seconds)
            reason = flaw or decided  # what is wrong here says more than that it is so on some rank
            if not reason and snapshot is not None:
                with _one_thread():
                    younger = snapshot.restore(self._run.parts)
                    self._zero_gradients()
                with self._ring_lock:  # the disk thread may be done with one of them just now
                    void = self.ring.void_after(promise.to)
                if self.disk is not None:
                    self.disk.rewound(promise.to)
                ok, reason = True, self._adjust_loop(verdict, younger)
        except InDoubt as error:
            reason, touched = f"the other ranks may have restored step {promise.to} or not: {error}", True
            self._stop = RunStopped(f"{reason}. Start the job again: only that brings all ranks to one state")
        except RollbackError as error:
            reason, flawed = str(error), True
        except Exception as fault:
            faults.let_through(fault)
            self._disarm(fault)
            reason, touched = f"restored in part at most: {fault}", True
        seconds = time.perf_counter() - started
        return wire.RolledBack(
            id=promise.id,
            ok=ok,
            to=promise.to,
            at=promise.at,
            seconds=seconds,
            reason=reason,
            touched=touched,
            flawed=flawed,
            void=void,
        )

    def _find_usable(self, to: int) -> tuple[Snapshot | None, str]:
        """Return the snapshot of step `to`, and why the run cannot go back to it; empty if it can."""
        snapshot = self.ring.find(to)
        if snapshot is None:
            return None, self._fault or f"no snapshot of step {to} is held"
        with _one_thread():
            return snapshot, snapshot.flaw()

    def _zero_gradients(self) -> None:
        with torch.no_grad():
            for parameter, _ in self._run.weights.live().values():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def _adjust_loop(self, verdict: wire.Commit, younger: Sequence[str]) -> str:
        """Lower rates and leave out batches. Returns what could not be done."""
        missing = [self._rates.multiply(verdict.lr_factor)]
        missing += [f"{name} was made after the snapshot: left as it is" for name in younger]
        if self._session.batches is not None:
            missing.append(self._session.batches.skip(verdict.skip_batches))
        return "; ".join(filter(None, missing))

    # Called by the receiver.

    def receive(self, message: wire.Message) -> None:
        """Handle a message from the daemon, if it is about rollback."""
        match message:
            case wire.Held():
                if message.seq in self.held:
                    self.ring.shared.add(message.seq)
            case wire.Publish():
                self._publish(message)
            case wire.CancelPublish():
                if self.disk is not None:
                    self.disk.give_up(message.id)
            case wire.Withhold():
                # Multiples of `every` and not "the next healthy step": ranks get this a few steps apart, and only a
                # snapshot that all of them hold is of use to all.
                self._unhealthy_until = self._promise.exited + message.steps
            case _:
                super().receive(message)

    def _prepare_answer(self, message: wire.Prepare) -> wire.Prepared | None:
        # If this comes too late, the daemon asks again: what is held must still be held then.
        self._no_snapshot_until = time.monotonic() + SUSPICION_SECONDS
        with self._ring_lock:
            return super()._prepare_answer(message)

    def _find_hindrance(self, message: wire.Prepare) -> str:
        held = self.held
        if message.stops or (message.to in held and not self._fault):
            return ""
        return self._fault or f"no snapshot of step {message.to} is held, but {list(held)}"

    def _publish(self, message: wire.Publish) -> None:
        with self._ring_lock:
            snapshot = self.ring.pin(message.seq) if self.disk is not None else None
        if snapshot is None or self.disk is None:
            if self.disk is not None:
                self.disk.give_up()
            held = list(self.held)
            reason = self._fault or f"the snapshot of step {message.seq} is not held, but {held}, or one is written"
            self._session.send(wire.Published(id=message.id, ok=False, seq=message.seq, reason=reason))
            return
        self.disk.publish(message, snapshot, self._run.parts, self._end_publication)

    def _end_publication(self, answer: wire.Published) -> None:
        with self._ring_lock:
            self.ring.unpin()
        self._session.send(answer)

    def close(self) -> None:
        """Release the memory and restore the learning rates. Nothing is promised from then on."""
        self._fault = self._fault or "rollback is detached"
        self._rates.close()
        if self.disk is not None:
            self.disk.close()
        self.ring.close()
        super().close()

    def _fail(self, fault: Exception) -> None:
        """Handle a fault in taking a snapshot. After a passing error another may be taken; any other fault disarms
        rollback."""
        faults.let_through(fault)
        if not is_passing(fault):
            self._disarm(fault)
            return
        self.ring.break_off()
        self._unseen.record_failure(_SNAPSHOTS, "a snapshot", "without it")

    def _disarm(self, fault: Exception) -> None:
        if not self._fault:
            known = isinstance(fault, RollbackError)
            self._fault = str(fault) if known else repr(fault)
            logger.error("rollback is disarmed, training goes on: %s", self._fault, exc_info=not known)
            self.ring.close()
            self._session.disarm(self._fault)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread for hundreds of short copies.

    On busy cores each copy would wait for the last of its OpenMP threads to be scheduled (600 MB in 300 tensors, two
    cores under load: 0.2 s against 1.9 s).
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)
