"""Trains a family with a real daemon, and judges from the histories what was reported of each run."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sentinel.hooks.core.governor import RARE_STEPS
from sentinel.node import paths
from sentinel.store import History
from tests.faults import utilization
from tests.faults.fault import LATE_SECONDS, Fault
from tests.faults.train import faults
from tests.notify.pages import Paged, paged
from tests.zygote import RANKS, TORCHRUN, run_fork

ROOT = Path(__file__).parents[2]
START_SECONDS, END_SECONDS, TRAIN_SECONDS = 60.0, 60.0, 560.0
PACED_SECONDS = 7200.0
"""Limit in seconds for training at a pace, or late: 9,000 steps of 200 ms take half an hour, and so does the twin."""

FIRST_STEPS = 64
"""Most steps until the alert, at default settings, if the fault is there from the start."""
TIMED = ("throughput", "hardware", "utilization", "jobs")
"""Families that are about time."""
OF_THE_MACHINE = ("SlowStep", "InputBound", "HostMemoryLow", "CgroupMemoryLow", "GpuShared")
"""Alerts that may be true on a machine with other work: no false alarms, if the fault is not about time.

They come on pages of their own.
"""


@dataclass
class Verdict:
    """What was reported of a fault and of its twin."""

    id: str
    seed: int
    alert: str
    delay: int | None = None
    """From the onset to the alert, in the unit of `Fault.signal`; without `every_step` in steps instead of samples.

    None: the alert did not fire, or fired before the fault had an effect.
    """
    allowed: int = 0
    cause: str = ""
    right: bool = False
    """Whether the cause is right, and the case says all that it must."""
    also: tuple[str, ...] = ()
    """Other alerts that fired."""
    false_alarms: tuple[str, ...] = ()
    """Alerts that fired for the healthy twin."""
    pages: dict[str, int] = field(default_factory=dict)
    """Receiver -> number of pages about the faulty run."""
    one_page: bool = False
    """Whether each receiver got one page, apart from pages for alerts that are true of a busy machine."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    """What is wrong, in words."""

    @property
    def good(self) -> bool:
        """Whether the fault was found in time, with the right cause, by one page, and its twin raised no alarm."""
        return not self.notes


def verdicts(
    family: str,
    seed: int,
    only: Sequence[str] = (),
    *,
    every_step: bool = False,
    late: bool = False,
    pace: int = 0,
    device: str = "cpu",
) -> list[Verdict]:
    """Train a family, or some of its faults, and judge them.

    `every_step`: sample everything at every step, and count delays in samples; otherwise the settings are the defaults,
    and delays are counted in steps. `late`: train only faults that can begin late, and let them. `pace`: least
    milliseconds of a step.
    """
    wanted = [fault for fault in faults(family) if (not only or fault.id in only) and (fault.begins or not late)]
    with tempfile.TemporaryDirectory(prefix="f") as folder:
        with (
            paged(Path(folder, "config/sentinel")) as people,
            daemon(Path(folder), family) as (address, environment),
        ):
            how = [*["--every-step"] * every_step, *["--late"] * late, "--pace", str(pace), "--device", device]
            seconds = PACED_SECONDS if pace or late else TRAIN_SECONDS
            runs = trained(family, seed, [fault.id for fault in wanted], address, environment, how, seconds)
        with_run = find_histories(Path(folder))
        if device != "cpu":
            wanted = [replace(one, cause=one.late_cause, names=()) if one.late_cause else one for one in wanted]
        return [_judged(family, fault, seed, runs, with_run, people, every_step=every_step) for fault in wanted]


@contextmanager
def daemon(folder: Path, family: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a daemon with `--stay`, yield (address, environment), and end it so that its histories are complete.

    For families of hardware the daemon gets a fake driver.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
    places_ = {"SENTINEL_STATE": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config")}
    environment |= {**places_, "SENTINEL_RUNTIME": str(folder / "run"), "PYTHONPATH": str(ROOT)}
    module = "sentinel"
    if family in ("hardware", "utilization"):
        driver = ROOT / "tests" / "collect" / "driver"
        environment |= {"FAKE_STATE": str(folder / "gpus.json"), "PYTHONPATH": f"{driver}:{ROOT}"}
    if family == "utilization":
        module = utilization.__name__
        (folder / "rules.yaml").write_text(utilization.rule())
        environment["SENTINEL_RULES"] = str(folder / "rules.yaml")
    directory = folder / "d"
    command = [sys.executable, "-m", module, "daemon", "--stay", "--nice", "0", "--directory", str(directory)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd="/", stderr=log, stdout=log, env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not paths.socket_path(directory).exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the daemon does not listen"
            time.sleep(0.02)
        yield f"unix:{paths.socket_path(directory)}", environment
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


def find_histories(folder: Path) -> dict[str, Path]:
    """Return run name -> path of its history."""
    found = {}
    for path in (folder / "state").rglob("*.sqlite"):
        with History(path) as history:
            found[history.run] = path
    return found


def trained(
    family: str,
    seed: int,
    ids: Sequence[str],
    address: str,
    environment: dict[str, str],
    how: Sequence[str],
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Train faults in a process; return what it prints about each run, by the run's name."""
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"] if family == "jobs" else [sys.executable]
    command = [*launch, "-m", "tests.faults.train", family, "--seed", str(seed)]
    command += ["--address", address, "--only", ",".join(ids), *how]
    environment = {**environment, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"env": environment, "cwd": ROOT, "timeout": seconds}
    if "cpu" in how:
        done = run_fork(command, RANKS, **options)
    else:  # CUDA does not survive a fork
        done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "internal fault" not in done.stderr, done.stderr[-4000:]
    return {run["run"]: run for run in map(json.loads, re.findall(r"^{.*}$", done.stdout, re.M))}


def _judged(
    family: str,
    fault: Fault,
    seed: int,
    runs: dict[str, dict[str, Any]],
    kept: dict[str, Path],
    people: Paged,
    *,
    every_step: bool,
) -> Verdict:
    verdict = Verdict(fault.id, seed, fault.alert, allowed=fault.delay)
    for faulty, kind in ((True, "faulty"), (False, "healthy")):
        run = runs[f"{fault.id} {kind} {seed}"]
        verdict.seconds += run["seconds"]
        with History(kept[run["run"]]) as history:
            cases = history.incidents()
            if run["dropped"] or history.last_seq(0) != run["steps"] - 1:
                verdict.notes.append(
                    f"{kind}: {run['dropped']} dropped, {history.last_seq(0) + 1} of {run['steps']} kept"
                )
            if faulty:
                _hold_against(verdict, fault, cases, history, run, every_step=every_step)
            else:
                about_it = family in TIMED
                verdict.false_alarms = tuple(
                    case["alert"] for case in cases if about_it or case["alert"] not in OF_THE_MACHINE
                )
    verdict.pages = people.count(f"{fault.id} faulty {seed}")
    verdict.one_page = hold_pages(verdict.pages, 1, () if family in TIMED else verdict.also)
    if verdict.delay is not None and not verdict.one_page:
        verdict.notes.append(f"one page for one fault: {verdict.pages}, {fault.alert} and {', '.join(verdict.also)}")
    if verdict.false_alarms:
        verdict.notes.append(f"the healthy twin raised {', '.join(verdict.false_alarms)}")
    return verdict


def hold_pages(pages: dict[str, int], expected: int, alerts: Iterable[str]) -> bool:
    """Return whether each receiver got `expected` pages, plus at most one for each alert true of a busy machine."""
    excused = sum(alert in OF_THE_MACHINE for alert in alerts)
    return all(expected <= count <= expected + excused for count in pages.values())


def _hold_against(
    verdict: Verdict,
    fault: Fault,
    cases: list[dict[str, Any]],
    history: History,
    run: dict[str, Any],
    *,
    every_step: bool,
) -> None:
    onset = run["onset"]
    verdict.also = tuple(case["alert"] for case in cases if case["alert"] != fault.alert)
    case = next((case for case in cases if case["alert"] == fault.alert), None)
    by_the_clock = fault.signal in ("seconds", "readings")
    if case is None:
        verdict.notes.append(f"no {fault.alert}; there were: {', '.join(verdict.also) or 'none'}")
        if not by_the_clock and all(seq < onset for seq in _samples(history, fault.signal)):
            verdict.notes.append(
                f"{fault.signal} has no sample in the {run['steps'] - onset} steps from the fault at step {onset} on: "
                f"train more of them, or plant it earlier; tier 3 is rare after the first {FIRST_STEPS} steps"
            )
        return
    verdict.cause = case["diagnosis"]["cause"]
    if case["time"] < run["onset_time"] if by_the_clock else case["step"] < onset:
        verdict.notes.append(f"{fault.alert} at step {case['step']}, before the fault at {onset}")
        return
    if fault.signal == "seconds":
        verdict.delay = math.ceil(case["time"] - run["onset_time"])
    elif fault.signal == "readings":
        gpu = next(name for name in history.devices() if "gpu" in name)
        readings = history.readings(["gpu_utilization_ratio"], gpu)["gpu_utilization_ratio"]
        verdict.delay = sum(run["onset_time"] <= time <= case["time"] for time in readings.times)
        # The readings come at a quicker pace, and what the daemon takes to report a fault does not.
        verdict.allowed = fault.delay + math.ceil(LATE_SECONDS / utilization.READING_SECONDS)
    elif every_step:
        verdict.delay = max(sum(onset <= seq <= case["step"] for seq in _samples(history, fault.signal)) - 1, 0)
    else:
        verdict.delay = case["step"] - onset
        late = math.ceil(LATE_SECONDS * run["steps"] / run["seconds"])
        samples = _samples(history, fault.signal)
        spacing = max((b - a for a, b in itertools.pairwise(samples) if b <= case["step"]), default=0)
        verdict.allowed = max(fault.delay, late, spacing, FIRST_STEPS if onset == 0 else 0)
    if verdict.delay > verdict.allowed:
        unit = "samples" if every_step else "steps"
        verdict.notes.append(f"{fault.alert} after {verdict.delay} {unit}, {verdict.allowed} are allowed")
    text = json.dumps(case, ensure_ascii=False)
    unsaid = [pattern for pattern in fault.names if not re.search(fill_steps(pattern, onset), text)]
    known = bool(re.search(fill_steps(fault.cause, onset), verdict.cause))
    verdict.right = known and not unsaid
    if not known:
        verdict.notes.append(f"cause {verdict.cause!r} is not {fault.cause!r}")
    verdict.notes += [f"the case does not say {pattern!r}: {text}" for pattern in unsaid]


def _samples(history: History, signal: str) -> Sequence[int]:
    if signal.startswith("layer_"):
        return [seq for seq, layers in history.layers() if signal in layers.stats]
    return history.series(signal).seqs


def fill_steps(pattern: str, onset: int) -> str:
    """Return a pattern of `Fault` with the steps of this run filled in."""
    before, after = range(max(onset - RARE_STEPS, 0), onset), range(onset, onset + RARE_STEPS)
    near, around = range(onset - 1, onset + 9), rf"between steps {_match_any(before)} and {_match_any(after)}\b"
    return pattern.replace("ONSET", rf"{onset}\b").replace("NEAR", _match_any(near)).replace("AROUND", around)


def _match_any(steps: range) -> str:
    return f"({'|'.join(map(str, steps))})"
