"""Kills the daemon with -9 at random moments of a run with an open incident, and checks that it is not noticeable.

Each run is compared with the same run without Sentinel: weights must be the same to the bit, and the steps. There must
be one incident, one alert and one line that it is over, every step in the history, and no process or file left behind.
On a busy machine stock rules may find the run slow: their alerts, too, must not come twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from bench.places import find_daemon, make_places

STEPS, HIGH_FROM, HIGH_TO = 2500, 40, 2300
STEP_SECONDS = 0.006
PATIENCE_SECONDS = 60.0
"""How long a run waits for a daemon at its end: a busy machine may need more than the usual two seconds."""
KILLS_A_RUN = 4
"""Kills in a run. The pauses before a new daemon grow with each: 0, 1, 2 seconds."""
RULES = """
group: kills
signals: {level: what the run logs}
rules:
  - alert: High
    expr: level > 5
    annotations: {summary: "level {level:.0f}"}
"""


def train() -> None:
    """Train the run, and print as JSON its steps, a digest of its weights, and what `on_alert` got."""
    import hashlib

    import torch

    import sentinel
    from sentinel.hooks.session import monitor as monitors

    monitors.GOODBYE_SECONDS = PATIENCE_SECONDS
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alerts: list[list[str]] = []
    with sentinel.attach(model, optimizer, run="kills") as monitor:
        monitor.on_alert(lambda alert: alerts.append([alert["alert"], alert["event"], alert["id"]]))
        for step in range(STEPS):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            monitor.log(level=9.0 if HIGH_FROM <= step < HIGH_TO else 1.0)
            optimizer.step()
            if "SENTINEL_DISABLED" not in os.environ:
                time.sleep(max(STEP_SECONDS - (time.perf_counter() - begin), 0.0))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(json.dumps({"steps": STEPS, "weights": digest, "alerts": sorted(alerts)}))


def run_killed(seed: int, kills: int, settings: str = "", *, last: bool = False) -> int:
    """Make a run whose daemon is killed, and check it; return how often the daemon was killed.

    `last`: kill in the run's last moments. Raises AssertionError with what could be noticed.
    """
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        root = Path(folder)
        (root / "rules.yaml").write_text(RULES)
        places = make_places(root, settings)
        environment = {**os.environ, **places, "SENTINEL_RULES": str(root / "rules.yaml")}
        command = [sys.executable, "-m", "bench.proofs._kills"]
        bare = subprocess.run(
            command, env={**environment, "SENTINEL_DISABLED": "1"}, check=True, capture_output=True, text=True
        )
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            killed = _kill_at_random(run, root / "run", random.Random(seed), kills, last=last)
            output, terminal = run.communicate()
        _compare(json.loads(bare.stdout), json.loads(output or "{}"), terminal)
        _check_nothing_is_left(root)
        with mock.patch.dict(os.environ, places):
            _check_history(root)
        return killed


def _kill_at_random(run: subprocess.Popen[str], runtime: Path, chance: random.Random, kills: int, *, last: bool) -> int:
    """Kill each daemon that serves, at a random moment after its socket opens; return the number of kills."""
    whole = STEPS * STEP_SECONDS
    begin, killed, victims = time.monotonic(), 0, set[int]()
    while run.poll() is None and killed < kills:
        daemon = find_daemon(runtime)
        if daemon is None or daemon in victims:
            time.sleep(0.002)
            continue
        # `last`: at about the last step, when the run says goodbye.
        time.sleep(
            max(whole + chance.uniform(0.0, 1.0) - (time.monotonic() - begin), 0) if last else chance.uniform(0, 1.5)
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)
            victims.add(daemon)
            killed += 1
    return killed


def _compare(bare: dict[str, Any], watched: dict[str, Any], terminal: str) -> None:
    for key in ("steps", "weights"):
        assert watched.get(key) == bare[key], f"{key}: {watched.get(key)}, not {bare[key]}"
    ours = [(event, number) for alert, event, number in watched["alerts"] if alert == "High"]
    assert [event for event, _ in ours] == ["fired", "resolved"], f"on_alert got {watched['alerts']}"
    assert ours[0][1] == ours[1][1], f"on_alert got {watched['alerts']}"
    once = [tuple(each) for each in watched["alerts"] if each[1] in ("fired", "resolved")]
    assert len(once) == len(set(once)), f"on_alert got {watched['alerts']}"
    for words in ("SENTINEL WARNING  High", "High (since step 40): over at step 2300"):
        printed = terminal.count(words)
        assert printed == 1, f"{words!r} was printed {printed} times: {terminal[-2000:]}"


def _check_nothing_is_left(root: Path) -> None:
    """Check that no file and no process of the run is left. A daemon killed at the very end must be replaced first."""
    deadline = time.monotonic() + 30
    while left := [*(root / "run").iterdir(), *(root / "state").rglob("*.json"), *_list_processes(root)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def _list_processes(root: Path) -> list[str]:
    found, mark = [], f"SENTINEL_RUNTIME={root}/run".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(f"process {entry.name}: {(entry / 'cmdline').read_bytes()!r}")
    return found


def _check_history(root: Path) -> None:
    from sentinel.store import History

    (path,) = (root / "state" / "runs").glob("*.sqlite")
    with History(path) as history:
        seqs, attempts = list(history.series("loss").seqs), history.attempts()
        incidents = [(case["alert"], case["state"], case["first_step"]) for case in history.incidents()]
    missing = sorted(set(range(STEPS)) - set(seqs))
    assert seqs == list(range(STEPS)), f"history: {len(seqs)} rows of {STEPS} steps, missing {missing[:10]}"
    assert [one for one in incidents if one[0] == "High"] == [("High", "resolved", HIGH_FROM)], (
        f"incidents: {incidents}"
    )
    assert len(attempts) == 1, f"attempts: {attempts}"
    assert attempts[0][2] is not None, f"attempts: {attempts}"


if __name__ == "__main__":
    train()
