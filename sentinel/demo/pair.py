"""A fault beside its healthy twin: both processes started, followed to their end, and judged."""

from __future__ import annotations

import contextlib
import platform
import secrets
import shutil
import time
from importlib.metadata import version
from pathlib import Path

from sentinel.demo import faulty, shard
from sentinel.demo.display import Display, Row
from sentinel.demo.drive import POLL_SECONDS, STALL_SECONDS, DemoFailed, history_of
from sentinel.demo.record import LossCurve, RecordedAlert, alert_of
from sentinel.demo.story import ALONE_COLOUR, WATCHED_COLOUR, State
from sentinel.demo.trainee import Trainee, environment
from sentinel.demo.twins import FAULTY, HEALTHY, KINDS, Fault, Side, Twins, failing
from sentinel.errors import ConfigError
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
"""The rule file that the demo of a hang brings, as a user would."""


class Pair:
    """One demo: both processes, followed to their end. Use as a context manager: leaving it ends both."""

    def __init__(self, fault: Fault, seed: int, steps: int, out: Path) -> None:
        self.fault, self.seed, self.steps, self.out = fault, seed, steps, out
        self.kind = KINDS[fault]
        self.said: list[str] = []
        """What the faulty run printed on stderr."""
        self._run_id = f"demo-{fault}-{secrets.token_hex(3)}"
        self._began = time.monotonic()
        self._ended = False
        self._endings = contextlib.ExitStack()

    def __enter__(self) -> Pair:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._start()
        except OSError as error:
            raise ConfigError(f"{error.filename or self.out}: {error.strerror}; name another --out") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._endings.close()

    def _start(self) -> None:
        data, first = self.out / "shard.bin", round(self.steps * self.kind.begins)
        shard.write_blanked(
            data, batches=self.steps + 1, seed=self.seed, blank=shard.blanks(self.fault, first, self.steps)
        )
        arguments = ["--data", str(data), "--seed", str(self.seed), "--steps", str(self.steps)]
        script = Path(shutil.copy(SCRIPTS / f"{self.fault}.py", self.out))  # where a user's script would be: not ours
        with contextlib.ExitStack() as endings:
            self.faulty = Trainee(self.out / "faulty", [*arguments, "--fault"], self._make_environment(""), script)
            endings.callback(self.faulty.end)
            self.healthy = Trainee(self.out / "healthy", arguments, self._make_environment("-twin"), script)
            endings.callback(self.healthy.end)
            self._endings = endings.pop_all()

    def _make_environment(self, suffix: str) -> dict[str, str]:
        named = environment(SENTINEL_RUN=f"demo{suffix}", SENTINEL_RUN_ID=f"{self._run_id}{suffix}")
        if not self.kind.ends:
            rules = self.out / "soon.yaml"
            rules.write_text(SOON)
            named["SENTINEL_RULES"] = str(rules)
        return named

    def follow(self, display: Display) -> None:
        """Show both until they end. Raises DemoFailed where one of them fails, or stands still."""
        running, seen, since = True, 0, time.monotonic()
        while running:
            # Asked before the files are read: what a process wrote last is then read too.
            running = any(trainee.exit_code is None for trainee in (self.faulty, self.healthy))
            self._take(display)
            self._end_stuck(display)
            for trainee in (self.faulty, self.healthy):
                if trainee.exit_code and not (trainee is self.faulty and self._ended):
                    raise DemoFailed(f"a run ended with exit code {trainee.exit_code}; see {trainee.stderr_path}")
            if (now := self.faulty.step + self.healthy.step) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                raise DemoFailed(f"no training step in {STALL_SECONDS:.0f} s; see {self.faulty.stderr_path}")
            time.sleep(POLL_SECONDS)

    def _end_stuck(self, display: Display) -> None:
        """The run that is stuck, once it was told of and its twin is through."""
        if self.kind.ends or self._ended or not self._was_alert_told() or self.healthy.exit_code is None:
            return
        self._ended = True
        self.faulty.end()
        display.show_line("The demo ends the process that is stuck. In earnest you would look at the line")
        display.show_line("above, and end it; `sentinel incidents show` has the stacks of all its threads.")

    def _was_alert_told(self) -> bool:
        return any(f" {self.kind.alert} " in line for line in self.said) and self.said[-1].startswith("\u2517")

    def _take(self, display: Display) -> None:
        for line in self.faulty.follow():
            self.said.append(line)
            display.show_line(line)
        self.healthy.follow()
        display.progress(self._row(FAULTY, ALONE_COLOUR, self.faulty), self._row(HEALTHY, WATCHED_COLOUR, self.healthy))

    def _row(self, name: str, colour: str, trainee: Trainee) -> Row:
        return Row(name, colour, trainee.curve, self._state(trainee), self._value(trainee.curve))

    def _state(self, trainee: Trainee) -> State:
        if not trainee.curve.steps:
            return "starting"
        if trainee is self.healthy:
            return "training" if trainee.step < self.steps - 1 else "done"
        if self._ended:
            return "ended"
        if any(f" {self.kind.alert} " in line for line in self.said):
            return "alert" if self.kind.ends else "stuck"
        begins = self.steps * self.kind.begins - (not self.kind.ends)  # a step that never comes
        return "faulty" if trainee.step >= begins else "training"

    def _value(self, curve: LossCurve) -> str:
        if not self.kind.ends:
            return f"last step {max(time.time() - curve.times[-1], 0):3.0f} s ago" if curve.times else "no step yet"
        name, _, unit = self.kind.value.partition(" (")
        value = self.kind.format_value(curve.values[-1]) if curve.values else "-"
        return f"{name} {value} {unit.rstrip(')')}".rstrip()

    def twins(self) -> Twins:
        """What came of it. Raises DemoFailed where it did not show what it is there to show."""
        found = Twins(
            fault=self.fault, seed=self.seed, steps=self.steps,
            faulty=Side(FAULTY, self._run_id, self.faulty.curve, _alerts(self._run_id)),
            healthy=Side(HEALTHY, f"{self._run_id}-twin", self.healthy.curve, _alerts(f"{self._run_id}-twin")),
            python=platform.python_version(), torch=version("torch"), seconds=time.monotonic() - self._began,
        )  # fmt: skip
        if reason := failing(found):
            raise DemoFailed(f"{reason}; what the runs said: {self.out}/*/stderr.txt")
        return found


def _alerts(run_id: str) -> list[RecordedAlert]:
    path = history_of(run_id)
    if path is None:
        return []
    with History(path) as history:
        return [alert_of(case) for case in history.incidents()]
