"""Takes in what arrives for one run: messages of its ranks, steps that close, stages, and observations from outside.

Batch -> Attempt -> closed RunStep -> history, and `incidents.py`
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import msgspec

from sentinel import wire
from sentinel.actions.evidence import out_of_memory
from sentinel.collect import DeviceFault
from sentinel.daemon.ranks.stalls import StallDetector
from sentinel.daemon.run.actions import RunActions
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incidents import RunIncidents
from sentinel.daemon.run.spacing import describe_spacing
from sentinel.diagnose.standstill.stacks import find_place
from sentinel.engine import Observation
from sentinel.runs import Rank, Stage
from sentinel.runs.devices import Devices, Gpu
from sentinel.signals import OPENING_END

log = logging.getLogger(__name__)

DEVICES_SECONDS = 15.0
"""Seconds between two readings of a GPU or the host that the history keeps: Prometheus' usual interval."""


class RunIngest:
    """Takes in what ranks and devices report. Each step passes here once, in order."""

    def __init__(self, context: RunContext, incidents: RunIncidents, actions: RunActions) -> None:
        self._context, self._run, self._store = context, context.run, context.store
        self._incidents, self._actions = incidents, actions
        self.portion = math.inf
        """Seconds for which steps are judged at a time; the others wait for the next `advance`."""
        self.behind = False
        """Whether closed steps wait for the next `advance`."""
        self._ending = False
        """Whether no rank is left, and the attempt is ended once all steps are judged."""
        self._command_status: int | None = None
        self._left_out: tuple[int, ...] = ()
        self._keep_device_at: dict[str, float] = {}
        self._host_signals = frozenset[str]()
        """Signals that readings of the host have had so far."""
        self.stalls = StallDetector(self._run.attempt, context.link, incidents)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Begin everything that belongs to an attempt again, for the run's new attempt."""
        self.stalls.close()
        self.stalls = StallDetector(self._run.attempt, self._context.link, self._incidents)
        self._incidents.begin_attempt()
        self._actions.begin_attempt(self.stalls.stacks)

    def hello(self, hello: wire.Hello, now: float, process: int = 0) -> Rank:
        """Take in a rank's hello, its first or a changed one. Raises ProtocolError if its attempt is over."""
        known = self._run.attempt.ranks.get(hello.identity.rank)
        seen_before = known.hello.unseen if known is not None else ()
        judged_before = known.hello.facts.get("judged_as") if known is not None else None
        if self._run.begins_attempt(hello.identity):
            self.observe_deaths(now, last=True)
        rank, began = self._run.hello(hello, now)
        rank.process, self._ending = process, False
        attached = min(hello.began or time.time(), time.time())
        self._run.began = self._run.began or attached
        number, body = hello.identity.rank, msgspec.msgpack.encode(hello)
        if began:
            self.begin_attempt()
            self._incidents.log.close_former()
            if self._store:
                self._store.records.begin_attempt(self._run.attempt.number, body, attached)
        if self._store:
            alone = hello.identity.local_world_size == 1
            self._store.records.add_rank(self._run.attempt.number, number, process=process, hello=body, alone=alone)
        self._context.record_event(hello.next_seq, "hello", rank=number, pid=hello.identity.pid)
        if hello.unseen != (() if began else seen_before):
            self._context.record_event(hello.next_seq, "not seen", rank=number, what=list(hello.unseen))
        judged_as = hello.facts.get("judged_as")
        if judged_as and (began or judged_as != judged_before):
            self._context.record_event(hello.next_seq, "judged", rank=number, judged_as=judged_as)
        if hello.rollback is not None:
            self._incidents.apply(self._incidents.evaluator.be_rewindable(), now)
        return rank

    def tell_again(self, rank: Rank) -> None:
        """Send a rank that has just connected what it may have missed: a verdict, and the first rank notices."""
        self._actions.rollback.rejoin_rank(rank.identity.rank, rank.hello.promise)
        here = (number for number, known in self._run.attempt.ranks.items() if known.state != "gone")
        if rank.identity.rank == min(here):
            self._incidents.log.tell_again()

    def message(self, rank: Rank, message: wire.FromRank, now: float) -> None:
        """Take in a message that a rank sends after its hello."""
        number, attempt, rollback = rank.identity.rank, self._run.attempt, self._actions.rollback
        match message:
            case wire.Batch():
                added = attempt.take(rank, message, now)
                if self._store:
                    for step in added:
                        self._store.records.add_step(attempt.number, step)
                self.advance(now)
            case wire.LayerTable():
                attempt.add_table(message)
                if self._store:
                    self._store.records.add_layer_table(attempt.number, message.digest, msgspec.msgpack.encode(message))
            case wire.StageBegan():
                self._begin_stage(Stage(message.seq, "".join(c if c.isprintable() else " " for c in message.name)), now)
            case wire.SnapshotTaken():
                rank.hold_snapshot(message.seq, message.void)
                self._tell_held(message.seq)
                self._actions.pass_on()
                self._context.record_event(
                    message.seq, "snapshot", rank=number, bytes=message.nbytes, seconds=message.seconds
                )
            case wire.Prepared():
                rollback.add_promise(number, message, now)
            case wire.RolledBack():
                rank.snapshots -= set(message.void)
                rollback.add_restore_result(number, message, now)
            case wire.Published():
                if (written := self._actions.publishing.add_part(number, message)) is not None:
                    seq, seconds, nbytes = written
                    self._actions.pass_on()
                    self._context.record_event(seq, "snapshot on disk", bytes=nbytes, seconds=seconds)
            case wire.PhaseChanged():
                rank.phase = message.name
                self._context.record_event(message.seq, "phase", rank=number, name=message.name)
            case wire.Collected():
                self._actions.evidence.add_evidence(number, message)
                if message.what == "out_of_memory":
                    self._incidents.observe_between(out_of_memory(rank, attempt.closed_to), now)
            case wire.Reply():
                self.stalls.stacks.add_reply(number, message)
                self.stalls.collectives.add_reply(number, message)
            case wire.Goodbye():
                rank.goodbye, rank.heard = message, now
                self.advance(now)  # steps may have waited for ranks that will not come
                self._incidents.finish_deferred(now)  # while the rank is connected and can print notices
            case _:
                log.warning("rank %d: unexpected %s", number, type(message).__name__)

    def drop_rank(self, rank: Rank, now: float) -> None:
        """Handle the end of a rank's connection."""
        number, goodbye = rank.identity.rank, rank.goodbye
        if goodbye is None:  # a hanging rank has sent nothing for long, but lived until now
            rank.heard = rank.ending.time if rank.ending is not None else now
        self._run.attempt.lose(number, goodbye)
        self._incidents.observe_between(self.stalls.drop_rank(rank), now)
        self._record_past_standstill(now)
        self._actions.rollback.drop_rank(number, now)
        if self._store and goodbye:
            self._store.records.record_goodbye(self._run.attempt.number, number)
        if goodbye is None:
            self._context.record_event(rank.last_seq, "lost", rank=number, reason="connection lost")
        else:
            said = {"detail": goodbye.detail} if goodbye.detail else {}
            self._context.record_event(rank.last_seq, "goodbye", rank=number, reason=goodbye.reason, **said)
        self._ending = not self._run.attempt.live
        self.advance(now)

    def advance(self, now: float) -> None:
        """Judge the steps that have closed, for `portion` seconds at most."""
        judged, self.behind, until = False, False, time.monotonic() + self.portion
        self._incidents.clock.look()
        for step in self._run.attempt.take_closed(now):
            if self._store:
                self._store.records.add_step(self._run.attempt.number, step)
            before = self._incidents.judged_to
            judged |= self._incidents.judge(step, now)
            if before < OPENING_END <= self._incidents.judged_to:
                self._say_spacing()
            if time.monotonic() >= until:
                self.behind = True
                break
        if judged:
            self._actions.direct_sampling()
        self._actions.publish_snapshot()
        if self._ending and not self.behind:
            self._ending = False
            self._incidents.finish_deferred(now)
            self._incidents.end_opening(now)
            if self._store:
                self._store.records.end_attempt(self._run.attempt.number, self._run.attempt.find_end())

    def observe_machine(
        self, devices: Devices, observation: Observation, faults: Sequence[tuple[Gpu, DeviceFault]], now: float
    ) -> None:
        """Take in a reading of GPUs and host. `faults`: those of this run's GPUs since the last reading."""
        attempt = self._run.attempt
        attempt.devices = devices
        for gpu, fault in faults:
            detail = {"gpu": gpu.index, "uuid": gpu.uuid, "fault": fault.kind, "code": fault.code, "text": fault.text}
            self._context.record_event(attempt.closed_to, "gpu fault", **detail)
        self._incidents.observe_between(observation, now)
        if devices.host.keys() - self._host_signals:  # the host's CPU share is known from the second reading on
            self._host_signals |= devices.host.keys()
            self._incidents.explain_unknown()
        if self._store:
            for (scope, name), values in observation.values.items():
                if now >= self._keep_device_at.get(device := f"{scope} {name}", 0.0):
                    self._keep_device_at[device] = now + DEVICES_SECONDS
                    self._store.records.add_reading(attempt.number, device, observation.seq, observation.time, values)

    def observe_deaths(self, now: float, *, last: bool = False) -> None:
        """Handle ended processes, and rollbacks that end with them: after the last process no further tick comes.

        `last`: the attempt is over, so that no death waits for others.
        """
        self._incidents.observe_between(self.stalls.take_deaths(now, last=last), now)
        if number := self.stalls.take_request():
            self._context.record_event(self._run.attempt.last_seq, "end wanted", signal=number)
        self._actions.rollback.tick(now)

    def record_exit(self, process: int, status: int | None, now: float) -> None:
        """Take note of a process that has ended. `status`: its exit status as in `subprocess`; None: unknown."""
        for rank in self.stalls.record_exit(process, status, now):
            if status is not None:
                self._context.record_event(rank.last_seq, "process ended", rank=rank.identity.rank, status=status)
        if not self._run.attempt.live:
            self.advance(now)  # as after the last goodbye

    def record_job(self, job: wire.JobReport) -> None:
        """Record a supervisor's report: how its command ended, and which nodes the job goes on without.

        The supervisor repeats it; only changes are recorded.
        """
        if job.status is not None and job.status != self._command_status:
            self._context.record_event(self._run.attempt.last_seq, "command ended", status=job.status)
        if job.members.left_out != self._left_out:
            self._context.record_event(self._run.attempt.last_seq, "nodes left out", nodes=job.members.left_out)
        self._command_status, self._left_out = job.status, job.members.left_out

    def announce_end(self, number: int, why: str, now: float, *, left_out: bool = False) -> None:
        """The job's supervisor is about to send it this signal: ranks that end by it are not lost, unless it is 0.
        `why`: the supervisor's own reason; empty: it passes the signal on. `left_out`: the job goes on without this
        node."""
        if number:
            self.stalls.want_end(now)
        reason = ({"why": why} if why else {}) | ({"left_out": True} if left_out else {})
        self._context.record_event(self._run.attempt.last_seq, "end wanted", signal=number, **reason)

    def tick(self, now: float) -> None:
        """Check steps that wait for a silent rank, rules that wait for time to pass, and ranks that stand still."""
        self.advance(now)
        self._incidents.apply(self._incidents.evaluator.judge_deferred(), now)
        self._incidents.observe_between(self.stalls.tick(now), now)
        if (rank := self.stalls.take_standstill()) is not None:
            self._say_standstill(rank)
        self._record_past_standstill(now)
        self._incidents.observe_between(self._actions.observe_snapshot_age(), now)
        self.observe_deaths(now)

    def _say_spacing(self) -> None:
        """Print how often each tier is sampled after the opening examination, so that no user expects a later fault to
        be seen at its very step."""
        ranks = self._run.attempt.ranks
        if ranks and (spacing := ranks[min(ranks)].pace.spacing):
            self._context.tell(f"from here on: {describe_spacing(spacing)}")

    def _say_standstill(self, rank: Rank) -> None:
        attempt, place = self._run.attempt, find_place(rank)
        who = f"rank {rank.identity.rank}" if rank.identity.world_size > 1 else "the loop"
        text = f"{who} stands still after step {attempt.last_seq + attempt.step_offset}, for {rank.stall.seconds:.0f} s"
        text += f", at {place}" if place else ""
        self._context.record_event(attempt.last_seq, "standstill", rank=rank.identity.rank, text=text)
        self._context.tell(f"{text}; it {rank.stall.kind}")

    def _record_past_standstill(self, now: float) -> None:
        if (past := self.stalls.take_past_standstill(now)) is not None:
            number, seconds = past
            self._context.record_event(
                self._run.attempt.last_seq, "standstill over", rank=number, seconds=round(seconds, 3)
            )

    def _begin_stage(self, stage: Stage, now: float) -> None:
        if not self._run.attempt.announce_stage(stage):
            return
        self._context.record_event(stage.seq, "stage", name=stage.name)
        self._incidents.apply(self._incidents.begin_stages(self._incidents.judged_to), now)
        self._actions.rollback.begin_stage(now)
        self._incidents.preserve()

    def _tell_held(self, seq: int) -> None:
        """Tell the ranks of a snapshot that all of them hold: each decides by its own losses whether to take one."""
        attempt = self._run.attempt
        if len(attempt.live) > 1 and attempt.complete and seq in attempt.held:
            for rank in attempt.live:
                self._context.link.send(rank.identity.rank, wire.Held(seq=seq))
