"""The demo of a run on damaged data that Sentinel rolls back, beside the same run without Sentinel."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

from sentinel.demo import story
from sentinel.demo.course import Course, DemoFailed, find_history
from sentinel.demo.display import Display, Row
from sentinel.demo.outcome import DemoOutcome, describe_rescue
from sentinel.demo.record import DemoRecord, RecordedAlert, Samples, alert_of, save
from sentinel.demo.shard import BATCH_ROWS, BURST, ROW_BYTES, Damage, Fault, write_shard
from sentinel.demo.trainee import SCRIPT, environment
from sentinel.node import paths
from sentinel.store import History

STRIKE = 0.57
"""Share of the steps after which the damage begins."""
SPARE_BATCHES = 3 * BURST
"""Batches that are skipped by as many rollbacks as `budget` allows."""


class Rescue(Course):
    """Two runs on damaged data: with Sentinel the run is rolled back, without it the run stays wrecked."""

    def __init__(self, fault: Fault, seed: int, steps: int, out: Path) -> None:
        super().__init__(fault, seed, steps, out)
        self.damage = Damage(fault=fault, first=round(steps * STRIKE), batches=BURST)
        self._daemon_log: IO[bytes] | None = None

    @property
    def introduction(self) -> str:
        return (
            "A small GPT learns the text of Python's standard library, twice side by side: same script, same seed, "
            f"same data. Batches {self.damage.first} to {self.damage.last} are {self.damage.description}. "
            "One of them is watched:"
        )

    @property
    def code(self) -> list[str]:
        lines = [line.strip() for line in SCRIPT.read_text().splitlines() if "sentinel." in line and "=" in line]
        return ["import sentinel", *lines]

    def start(self) -> None:
        data = self.out / "shard.bin"
        write_shard(
            data, batches=self.steps + SPARE_BATCHES, batch_rows=BATCH_ROWS, row_bytes=ROW_BYTES, seed=self.seed,
            damage=self.damage,
        )  # fmt: skip
        arguments = ["--data", str(data), "--seed", str(self.seed), "--steps", str(self.steps)]
        self.launch("with-sentinel", arguments, environment(SENTINEL_RUN="demo", SENTINEL_RUN_ID=self.run_id))
        self.launch("without", arguments, environment(SENTINEL_DISABLED="1"))

    def rows(self) -> tuple[Row, Row]:
        watched, alone = (trainee.curve for trainee in self.trainees)
        return (
            Row(story.WATCHED, story.WATCHED_COLOUR, watched, story.state(watched, self.damage), story.loss(watched)),
            Row(story.ALONE, story.ALONE_COLOUR, alone, story.state(alone, self.damage), story.loss(alone)),
        )

    def conclude(self) -> DemoOutcome:
        alerts, refusals, norms = self._history()
        watched, alone = (trainee.curve for trainee in self.trainees)
        record = DemoRecord(
            seed=self.seed, steps=self.steps, damage=self.damage, watched=watched, alone=alone, alerts=alerts,
            grad_norm=norms, run_id=self.run_id, python=platform.python_version(), torch=version("torch"),
            seconds=time.monotonic() - self.began,
        )  # fmt: skip
        if reason := failing(record, refusals):
            raise DemoFailed(f"{reason}; {self.keep_logs()}")
        save(record, self.out / "record.json")
        return describe_rescue(record)

    def look(self, display: Display) -> None:
        """Hold the daemon's log open: it is removed with its directory when the run has ended."""
        if self._daemon_log is None:
            try:
                self._daemon_log = (paths.run_directory(self.run_id) / paths.LOG).open("rb")
                self.endings.callback(self._daemon_log.close)
            except OSError:
                pass  # not started yet, or a node's service serves

    def keep_logs(self) -> str:
        run = super().keep_logs()
        if self._daemon_log is None:
            return f"no daemon's log was found; {run}"
        path = self.out / "with-sentinel" / paths.LOG
        self._daemon_log.seek(0)
        path.write_bytes(self._daemon_log.read())
        return f"the daemon's log: {path}; {run}"

    def _history(self) -> tuple[list[RecordedAlert], list[str], Samples]:
        """Return alerts, reasons of rollbacks that failed, and gradient norms, from the history of the ended daemon."""
        path = find_history(self.run_id)
        if path is None:
            return [], [], Samples([], [])
        with History(path) as history:
            norms = history.series("grad_norm")
            refusals = [event.detail["reason"] for event in history.events("rollback") if not event.detail["ok"]]
            alerts = [alert_of(case) for case in history.incidents()]
        return alerts, refusals, Samples(list(norms.seqs), list(norms.values))


def failing(record: DemoRecord, refusals: Sequence[str] = ()) -> str:
    """Return what Sentinel did not do, in words; "" if it did everything."""
    if record.alert is None:
        return f"Sentinel raised no critical alert from step {record.damage.first} on"
    if record.rollback is None:
        why = f" ({refusals[-1]})" if refusals else ""
        return f"{record.alert.alert} fired at step {record.alert.step}, but the run was not rolled back{why}"
    if not record.saved:
        ends = f"{story.number(record.watched.level())} with Sentinel, {story.number(record.alone.level())} without"
        return f"the rollback did not part the two runs: the loss ends at {ends}"
    return ""
