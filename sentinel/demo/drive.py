"""The demo's course: write the shard, train twice side by side, collect what Sentinel did."""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

import msgspec

from sentinel.demo import story
from sentinel.demo.display import Display, Row
from sentinel.demo.record import DemoRecord, RecordedAlert, Samples, alert_of
from sentinel.demo.shard import BATCH_ROWS, ROW_BYTES, Damage, Fault, write_shard
from sentinel.demo.trainee import Trainee, environment
from sentinel.errors import ConfigError, SentinelError
from sentinel.node import paths
from sentinel.store import History

BURST = 40
"""Damaged batches, and what the example's `skip_batches` leaves out. At the example's rate (3e-3) they wrecked all
seeds that were tried; at half of it the network learns again within 60 steps."""
STRIKE = 0.57
"""Share of the steps at which the damage begins."""
SPARE_BATCHES = 3 * BURST
"""What as many rollbacks as `budget` allows leave out."""
POLL_SECONDS = 0.1
STALL_SECONDS = 120.0
"""Without a step of either run. Importing torch from a cold disk takes long, but not this long."""
HISTORY_SECONDS = 15.0
"""How long the daemon may take to write its history out once its run has ended."""


class DemoFailed(SentinelError):
    """The demo did not show what it is there to show."""


class DemoPlan(msgspec.Struct, frozen=True):
    """What is asked for."""

    fault: Fault
    seed: int
    steps: int
    out: Path

    @property
    def damage(self) -> Damage:
        """Which batches are damaged."""
        return Damage(fault=self.fault, first=round(self.steps * STRIKE), batches=BURST)


class Course:
    """One demo: two training processes, followed to their end. Use as a context manager: leaving it ends both."""

    def __init__(self, plan: DemoPlan) -> None:
        self.plan = plan
        self.run_id = f"demo-{plan.fault}-{secrets.token_hex(3)}"
        self.said: list[str] = []
        """What the watched run printed on stderr."""
        self._began = time.monotonic()
        self._daemon_log: IO[bytes] | None = None
        self._endings = contextlib.ExitStack()

    def __enter__(self) -> Course:
        try:
            self._start(self.plan)
        except OSError as error:
            raise ConfigError(f"{error.filename or self.plan.out}: {error.strerror}; name another --out") from None
        return self

    def _start(self, plan: DemoPlan) -> None:
        plan.out.mkdir(parents=True, exist_ok=True)
        shard = plan.out / "shard.bin"
        write_shard(
            shard, batches=plan.steps + SPARE_BATCHES, batch_rows=BATCH_ROWS, row_bytes=ROW_BYTES, seed=plan.seed,
            damage=plan.damage,
        )  # fmt: skip
        arguments = ["--data", str(shard), "--seed", str(plan.seed), "--steps", str(plan.steps)]
        named = environment(SENTINEL_RUN="demo", SENTINEL_RUN_ID=self.run_id)
        with contextlib.ExitStack() as endings:
            self.watched = Trainee(plan.out / "with-sentinel", arguments, named)
            endings.callback(self.watched.end)
            self.alone = Trainee(plan.out / "without", arguments, environment(SENTINEL_DISABLED="1"))
            endings.callback(self.alone.end)
            self._endings = endings.pop_all()

    def __exit__(self, *_: object) -> None:
        self._endings.close()

    def follow(self, display: Display) -> None:
        """Show both runs until they end. Raises DemoFailed where one of them fails, or stands still."""
        running, seen, since = True, 0, time.monotonic()
        while running:
            # Asked before the files are read: what a process wrote last is then read too.
            running = any(trainee.exit_code is None for trainee in (self.watched, self.alone))
            self._take(display)
            self._open_daemon_log()
            for trainee in (self.watched, self.alone):
                if trainee.exit_code:
                    raise DemoFailed(self._explain_death(trainee))
            if (now := self.watched.step + self.alone.step) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                raise DemoFailed(f"no training step in {STALL_SECONDS:.0f} s; {self._keep_log()}")
            time.sleep(POLL_SECONDS)

    def record(self) -> DemoRecord:
        """What came of it. Raises DemoFailed where Sentinel did not do what it is there for."""
        alerts, refusals, norms = self._history()
        record = DemoRecord(
            seed=self.plan.seed, steps=self.plan.steps, damage=self.plan.damage, watched=self.watched.curve,
            alone=self.alone.curve, alerts=alerts, grad_norm=norms, run_id=self.run_id,
            python=platform.python_version(), torch=version("torch"), seconds=time.monotonic() - self._began,
        )  # fmt: skip
        if reason := failing(record, refusals):
            raise DemoFailed(f"{reason}; {self._keep_log()}")
        return record

    def _take(self, display: Display) -> None:
        for line in self.watched.follow():
            self.said.append(line)
            display.show_line(line)
        self.alone.follow()
        display.progress(
            self._row(story.WATCHED, story.WATCHED_COLOUR, self.watched),
            self._row(story.ALONE, story.ALONE_COLOUR, self.alone),
        )

    def _row(self, name: str, colour: str, trainee: Trainee) -> Row:
        curve = trainee.curve
        return Row(name, colour, curve, story.state(curve, self.plan.damage), story.loss(curve))

    def _open_daemon_log(self) -> None:
        """Hold the daemon's log open: it goes with its directory when the run has ended."""
        if self._daemon_log is None:
            try:
                self._daemon_log = (paths.run_directory(self.run_id) / paths.LOG).open("rb")
                self._endings.callback(self._daemon_log.close)
            except OSError:
                pass  # not started yet, or a node's service serves

    def _keep_log(self) -> str:
        run = f"what the run said: {self.watched.stderr_path}"
        if self._daemon_log is None:
            return f"no daemon's log was found; {run}"
        path = self.plan.out / "with-sentinel" / paths.LOG
        self._daemon_log.seek(0)
        path.write_bytes(self._daemon_log.read())
        return f"the daemon's log: {path}; {run}"

    def _history(self) -> tuple[list[RecordedAlert], list[str], Samples]:
        """Alerts, reasons of rollbacks that were not made, gradient norms: what the daemon wrote, once it has ended."""
        path = history_of(self.run_id)
        if path is None:
            return [], [], Samples([], [])
        with History(path) as history:
            norms = history.series("grad_norm")
            refusals = [event.detail["reason"] for event in history.events("rollback") if not event.detail["ok"]]
            alerts = [alert_of(case) for case in history.incidents()]
        return alerts, refusals, Samples(list(norms.seqs), list(norms.values))

    def _explain_death(self, trainee: Trainee) -> str:
        name = story.WATCHED if trainee is self.watched else story.ALONE
        last = trainee.stderr_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no word on stderr"]
        return f"the run {name} ended with exit code {trainee.exit_code}: {last[0]}; see {trainee.stderr_path}"


def failing(record: DemoRecord, refusals: Sequence[str] = ()) -> str:
    """What Sentinel did not do, in words; empty where it did all."""
    if record.alert is None:
        return f"Sentinel raised no critical alert from step {record.damage.first} on"
    if record.rollback is None:
        why = f" ({refusals[-1]})" if refusals else ""
        return f"{record.alert.alert} fired at step {record.alert.step}, but the run was not rolled back{why}"
    if not record.saved:
        ends = f"{story.number(record.watched.level())} with Sentinel, {story.number(record.alone.level())} without"
        return f"the rollback did not part the two runs: the loss ends at {ends}"
    return ""


def history_of(run_id: str) -> Path | None:
    """Where a run's history is, once its daemon has ended; None where there is none."""
    daemon = paths.run_directory(run_id)
    deadline = time.monotonic() + HISTORY_SECONDS
    while daemon.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return next((path for path in paths.histories() if path.stem == run_id), None)
