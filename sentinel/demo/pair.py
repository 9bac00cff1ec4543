"""The demo of a fault beside its healthy twin: both are watched, and Sentinel must report only the one."""

from __future__ import annotations

import platform
import shutil
import time
from importlib.metadata import version
from pathlib import Path

from sentinel.demo import faulty, shard, twinstory
from sentinel.demo.course import Course, DemoFailed, find_history
from sentinel.demo.display import Display, Row
from sentinel.demo.outcome import DemoOutcome, describe_twins
from sentinel.demo.record import LossCurve, RecordedAlert, alert_of
from sentinel.demo.story import ALONE_COLOUR, WATCHED_COLOUR, State
from sentinel.demo.trainee import Trainee, environment
from sentinel.demo.twins import FAULTY, HEALTHY, KINDS, Fault, Side, Twins, failing
from sentinel.store import History

SCRIPTS = Path(next(iter(faulty.__path__)))
SOON = """\
group: demo
rules:
  - alert: Hang  # in place of the stock rule, which waits for a minute at least
    scope: rank
    expr: stalled_seconds > 10
    severity: critical
    actions: [evidence, stacks]
    annotations:
      summary: "no progress for {stalled_seconds:.0f} s after step {step}"
      remedy: Look at the stacks. Take what you need from the process, end it, and start again from a checkpoint.
      runbook: hang
"""
"""The rule file that the demo of a hang provides, as a user would."""


class Pair(Course):
    """A fault that no rollback fixes: Sentinel watches both runs, and reports the one that has it."""

    def __init__(self, fault: Fault, seed: int, steps: int, out: Path) -> None:
        super().__init__(fault, seed, steps, out)
        self.kind, self._fault = KINDS[fault], fault
        self._ended = False

    @property
    def introduction(self) -> str:
        return twinstory.setting(self._fault, self.seed, self.steps) + " Sentinel watches both."

    def start(self) -> None:
        data, first = self.out / "shard.bin", round(self.steps * self.kind.begins)
        shard.write_blanked(
            data, batches=self.steps + 1, seed=self.seed, blank=shard.blanks(self.fault, first, self.steps)
        )
        arguments = ["--data", str(data), "--seed", str(self.seed), "--steps", str(self.steps)]
        script = Path(shutil.copy(SCRIPTS / f"{self.fault}.py", self.out))  # outside our package, as a user's script
        self.launch("faulty", [*arguments, "--fault"], self._make_environment(""), script)
        self.launch("healthy", arguments, self._make_environment("-twin"), script)

    def _make_environment(self, suffix: str) -> dict[str, str]:
        named = environment(SENTINEL_RUN=f"demo{suffix}", SENTINEL_RUN_ID=f"{self.run_id}{suffix}")
        if not self.kind.ends:
            rules = self.out / "soon.yaml"
            rules.write_text(SOON)
            named["SENTINEL_RULES"] = str(rules)
        return named

    def look(self, display: Display) -> None:
        """End the run that is stuck, once its alert was shown and its twin has ended."""
        if self.kind.ends or self._ended or not self._is_alert_shown() or self.trainees[1].exit_code is None:
            return
        self._ended = True
        self.trainees[0].end()
        display.show_line("The demo ends the process that is stuck. In earnest you would look at the line")
        display.show_line("above, and end it; `sentinel incidents show` has the stacks of all its threads.")

    def _is_alert_shown(self) -> bool:
        return any(f" {self.kind.alert} " in line for line in self.said) and self.said[-1].startswith("\u2517")

    def explain_death(self, trainee: Trainee) -> str:
        return "" if self._ended and trainee is self.trainees[0] else super().explain_death(trainee)

    def rows(self) -> tuple[Row, Row]:
        faulty, healthy = self.trainees
        return (
            Row(FAULTY, ALONE_COLOUR, faulty.curve, self._state(faulty), self._value(faulty.curve)),
            Row(HEALTHY, WATCHED_COLOUR, healthy.curve, self._state(healthy), self._value(healthy.curve)),
        )

    def _state(self, trainee: Trainee) -> State:
        if not trainee.curve.steps:
            return "starting"
        if trainee is self.trainees[1]:
            return "training" if trainee.step < self.steps - 1 else "done"
        if self._ended:
            return "ended"
        if any(f" {self.kind.alert} " in line for line in self.said):
            return "alert" if self.kind.ends else "stuck"
        begins = self.steps * self.kind.begins - (not self.kind.ends)  # in a hang, the step itself never comes
        return "faulty" if trainee.step >= begins else "training"

    def _value(self, curve: LossCurve) -> str:
        if not self.kind.ends:
            return f"last step {max(time.time() - curve.times[-1], 0):3.0f} s ago" if curve.times else "no step yet"
        name, _, unit = self.kind.value.partition(" (")
        value = self.kind.format_value(curve.values[-1]) if curve.values else "-"
        return f"{name} {value} {unit.rstrip(')')}".rstrip()

    def conclude(self) -> DemoOutcome:
        faulty, healthy = (trainee.curve for trainee in self.trainees)
        found = Twins(
            fault=self._fault, seed=self.seed, steps=self.steps,
            faulty=Side(FAULTY, self.run_id, faulty, _alerts(self.run_id)),
            healthy=Side(HEALTHY, f"{self.run_id}-twin", healthy, _alerts(f"{self.run_id}-twin")),
            python=platform.python_version(), torch=version("torch"), seconds=time.monotonic() - self.began,
        )  # fmt: skip
        if reason := failing(found):
            raise DemoFailed(f"{reason}; {self.keep_logs()}")
        return describe_twins(found)


def _alerts(run_id: str) -> list[RecordedAlert]:
    path = find_history(run_id)
    if path is None:
        return []
    with History(path) as history:
        return [alert_of(case) for case in history.incidents()]
