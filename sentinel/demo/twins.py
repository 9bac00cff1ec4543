"""Two runs of one script side by side, one with a fault and one without, both watched: the demos of faults that no
rollback mends. What is shown is that Sentinel tells of the one, in time and with its cause, and not of the other."""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from sentinel.demo import faulty, shard
from sentinel.demo.display import Display, Row
from sentinel.demo.drive import POLL_SECONDS, STALL_SECONDS, DemoFailed, history_of
from sentinel.demo.record import Alert, Curve, alert_of
from sentinel.demo.story import ALONE_COLOUR, WATCHED_COLOUR, State
from sentinel.demo.trainee import Trainee, environment
from sentinel.errors import ConfigError
from sentinel.store import History

Fault = Literal["scaler", "leak"]

FAULTY, HEALTHY = "with the fault", "healthy twin"
SCRIPTS = Path(next(iter(faulty.__path__)))


class Kind(msgspec.Struct, frozen=True):
    """What is known of a fault before it is shown."""

    alert: str
    steps: int
    begins: float
    """Share of the steps at which it begins."""
    by: float
    """Share of the steps at which the alert must be there."""
    what: str
    """What is wrong in the one run, and is not in its twin."""
    value: str
    """The series that tells, with its unit."""
    scale: float = 1.0
    """From what the script logs to that unit."""
    log: bool = False

    def shown(self, value: float) -> str:
        """A logged value in the series' unit, without the unit."""
        value *= self.scale
        return f"{value:.0f}" if 1 <= value < 1e6 else f"{value:.3g}"


KINDS: dict[Fault, Kind] = {
    "scaler": Kind(
        alert="ScalerCollapse", steps=240, begins=0.5, by=0.6,
        what="One divides its embeddings by their length in fp16, where the epsilon of 1e-8 is 0; its twin does so in "
        "fp32. From step {first} on the data hold padding, whose length is 0.",
        value="loss scale", log=True,
    ),
    "leak": Kind(
        alert="MemoryCreep", steps=2400, begins=0.0, by=0.8,
        what="One keeps a slice of each batch's logits for a plot, and with the slice the whole; its twin keeps the "
        "number that is to be plotted.",
        value="resident set (MB)", scale=1e-6,
    ),
}  # fmt: skip


class Side(msgspec.Struct):
    """One of the two runs."""

    name: str
    run_id: str
    curve: Curve
    alerts: list[Alert] = []


class Twins(msgspec.Struct):
    """What came of both."""

    fault: Fault
    seed: int
    steps: int
    faulty: Side
    healthy: Side
    python: str
    torch: str
    seconds: float

    @property
    def kind(self) -> Kind:
        return KINDS[self.fault]

    @property
    def first(self) -> int:
        """The step at which the fault begins."""
        return round(self.steps * self.kind.begins)

    @property
    def alert(self) -> Alert | None:
        """The one that this is about."""
        return next((alert for alert in self.faulty.alerts if alert.alert == self.kind.alert), None)

    def points(self, side: Side) -> tuple[list[float], list[float]]:
        """x and y of the series that tells."""
        return [float(step) for step in side.curve.steps], [value * self.kind.scale for value in side.curve.values]

    def summary(self) -> dict[str, Any]:
        """What `sentinel demo --json` prints, less the paths of its files."""
        alert = self.alert
        return {
            "fault": self.fault,
            "seed": self.seed,
            "steps": self.steps,
            "fault_begins_at": self.first,
            "run_id": self.faulty.run_id,
            "alert": msgspec.to_builtins(alert),
            "alerts_of_the_twin": [other.alert for other in self.healthy.alerts],
            self.kind.value.split(" (")[0].replace(" ", "_"): {
                key: side.curve.values[-1] if side.curve.values else None
                for key, side in (("faulty", self.faulty), ("healthy", self.healthy))
            },
            "seconds": round(self.seconds, 1),
        }


class Pair:
    """One demo: both processes, followed to their end. Use as a context manager: leaving it ends both."""

    def __init__(self, fault: Fault, seed: int, steps: int, out: Path) -> None:
        self.fault, self.seed, self.steps, self.out = fault, seed, steps, out
        self.kind = KINDS[fault]
        self.said: list[str] = []
        """What the faulty run printed on stderr."""
        self._run_id = f"demo-{fault}-{secrets.token_hex(3)}"
        self._began = time.monotonic()
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
        data = self.out / "shard.bin"
        if self.fault == "scaler":
            shard.write_padded(data, batches=self.steps, seed=self.seed, first=round(self.steps * self.kind.begins))
        else:
            shard.write_shard(
                data, batches=self.steps, batch_rows=shard.SMALL_ROWS, row_bytes=shard.ROW_BYTES, seed=self.seed,
                damage=None,
            )  # fmt: skip
        arguments = ["--data", str(data), "--seed", str(self.seed), "--steps", str(self.steps)]
        script = SCRIPTS / f"{self.fault}.py"
        with contextlib.ExitStack() as endings:
            self.faulty = Trainee(self.out / "faulty", [*arguments, "--fault"], self._named(""), script)
            endings.callback(self.faulty.end)
            self.healthy = Trainee(self.out / "healthy", arguments, self._named("-twin"), script)
            endings.callback(self.healthy.end)
            self._endings = endings.pop_all()

    def _named(self, suffix: str) -> dict[str, str]:
        return environment(SENTINEL_RUN=f"demo{suffix}", SENTINEL_RUN_ID=f"{self._run_id}{suffix}")

    def follow(self, display: Display) -> None:
        """Show both until they end. Raises DemoFailed where one of them fails, or stands still."""
        running, seen, since = True, 0, time.monotonic()
        while running:
            # Asked before the files are read: what a process wrote last is then read too.
            running = any(trainee.exit_code is None for trainee in (self.faulty, self.healthy))
            self._take(display)
            for trainee in (self.faulty, self.healthy):
                if trainee.exit_code:
                    raise DemoFailed(f"a run ended with exit code {trainee.exit_code}; see {trainee.stderr_path}")
            if (now := self.faulty.step + self.healthy.step) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                raise DemoFailed(f"no training step in {STALL_SECONDS:.0f} s; see {self.faulty.stderr_path}")
            time.sleep(POLL_SECONDS)

    def _take(self, display: Display) -> None:
        for line in self.faulty.follow():
            self.said.append(line)
            display.said(line)
        self.healthy.follow()
        display.progress(self._row(FAULTY, ALONE_COLOUR, self.faulty), self._row(HEALTHY, WATCHED_COLOUR, self.healthy))

    def _row(self, name: str, colour: str, trainee: Trainee) -> Row:
        return Row(name, colour, trainee.curve, self._state(trainee), self._value(trainee.curve))

    def _state(self, trainee: Trainee) -> State:
        if not trainee.curve.steps:
            return "starting"
        if trainee is self.healthy:
            return "training" if trainee.step < self.steps - 1 else "done"
        if any(self.kind.alert in line for line in self.said):
            return "alert"
        return "faulty" if trainee.step >= self.steps * self.kind.begins else "training"

    def _value(self, curve: Curve) -> str:
        name, _, unit = self.kind.value.partition(" (")
        value = self.kind.shown(curve.values[-1]) if curve.values else "-"
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


def failing(twins: Twins) -> str:
    """What was not shown, in words; empty where all was."""
    kind, alert = twins.kind, twins.alert
    if alert is None:
        others = ", ".join(other.alert for other in twins.faulty.alerts) or "nothing"
        return f"Sentinel did not raise {kind.alert} ({others} instead)"
    if not twins.first <= alert.step <= twins.steps * kind.by:
        return f"{kind.alert} came at step {alert.step}, and the fault is there from step {twins.first} on"
    if twins.healthy.alerts:
        return f"Sentinel raised {twins.healthy.alerts[0].alert} for the healthy twin"
    return ""


def _alerts(run_id: str) -> list[Alert]:
    path = history_of(run_id)
    if path is None:
        return []
    with History(path) as history:
        return [alert_of(case) for case in history.incidents()]
