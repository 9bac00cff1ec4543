"""Kill the daemon with -9 at random moments of a run with an open incident, and look whether anybody notices.

    python bench/kills.py                 50 kills, several a run
    python bench/kills.py --kills 3       a short one
    python bench/kills.py --last          one kill a run, in its last moments

Each run is compared with the same run without Sentinel. Nothing may differ: weights to the bit, steps, one incident,
one alert and one word that it is over, every step in the history, and nothing left behind, neither process nor file.
What differs is printed, and the exit status is then 1. `--results FILE` keeps what is done: started again, the
script goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, HIGH_FROM, HIGH_TO = 2500, 40, 2300
STEP_SECONDS = 0.006
KILLS_A_RUN = 4
"""The pauses before a new daemon grow with each: 0, 1, 2 seconds."""
RULES = """
group: kills
signals: {level: what the run logs}
rules:
  - alert: High
    expr: level > 5
    annotations: {summary: "level {level:.0f}"}
"""


def train(patience: float) -> None:
    """The run: its steps, a digest of its weights, and what `on_alert` was told."""
    import hashlib

    import torch

    import sentinel
    from sentinel.hooks.session import monitor as monitors

    monitors.GOODBYE_SECONDS = patience
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alerts: list[list[str]] = []
    with sentinel.attach(model, optimizer, run="kills") as monitor:
        monitor.on_alert(lambda alert: alerts.append([alert["event"], alert["id"]]))
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


def trial(seed: int, kills: int, *, last: bool, patience: float) -> tuple[int, list[str]]:
    """One run. How often its daemon was killed, and what somebody could notice."""
    with tempfile.TemporaryDirectory(prefix="k") as folder:
        root = Path(folder)
        (root / "rules.yaml").write_text(RULES)
        places = {"SENTINEL_RUNTIME": folder + "/run", "SENTINEL_STATE": folder + "/state"}
        rules = str(root / "rules.yaml")
        environment = {**os.environ, **places, "SENTINEL_RULES": rules, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--train", "--patience", str(patience)]
        bare = subprocess.run(
            command, env={**environment, "SENTINEL_DISABLED": "1"}, check=True, capture_output=True, text=True
        )
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            killed = _kill_at_random(run, root / "run", random.Random(seed), kills, last=last)
            output, told = run.communicate()
        findings = _compared(json.loads(bare.stdout), json.loads(output or "{}"), told)
        findings += _left_behind(root)
        os.environ.update(places)
        return killed, findings + _history(root)


def _kill_at_random(run: subprocess.Popen[str], runtime: Path, chance: random.Random, kills: int, *, last: bool) -> int:
    """Kill what serves there. The moments are random: from the opening of its socket on."""
    whole = STEPS * STEP_SECONDS
    begin, killed, victims = time.monotonic(), 0, set[int]()
    while run.poll() is None and killed < kills:
        daemon = _serving(runtime)
        if daemon is None or daemon in victims:
            time.sleep(0.002)
            continue
        # In its last moments: until a little after its last step, when it says goodbye.
        time.sleep(
            max(whole + chance.uniform(0.0, 1.0) - (time.monotonic() - begin), 0) if last else chance.uniform(0, 1.5)
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)
            victims.add(daemon)
            killed += 1
    return killed


def _serving(runtime: Path) -> int | None:
    for path in runtime.glob("*/sentinel.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                return None
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
    return None


def _compared(bare: dict[str, Any], watched: dict[str, Any], told: str) -> list[str]:
    found = [
        f"{key}: {watched.get(key)}, not {bare[key]}" for key in ("steps", "weights") if watched.get(key) != bare[key]
    ]
    if watched.get("alerts") != [["fired", "0.1"], ["resolved", "0.1"]]:
        found.append(f"on_alert got {watched.get('alerts')}")
    for words in ("SENTINEL WARNING  High", "High (since step 40): over at step 2300"):
        if told.count(words) != 1:
            found.append(f"{words!r} was printed {told.count(words)} times: {told[-2000:]}")
    return found


def _left_behind(root: Path) -> list[str]:
    """Files, and processes of the run. A daemon that is killed at the very end has to be replaced first."""
    deadline = time.monotonic() + 30
    while True:
        files = [*(root / "run").iterdir(), *(root / "state").rglob("*.json")]
        found = [f"left behind: {path}" for path in files] + _processes(root)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _processes(root: Path) -> list[str]:
    found, mark = [], f"SENTINEL_RUNTIME={root}/run".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(f"process {entry.name} is left: {(entry / 'cmdline').read_bytes()!r}")
    return found


def _history(root: Path) -> list[str]:
    from sentinel.store import History

    found = []
    (path,) = (root / "state" / "runs").glob("*.sqlite")
    with History(path) as history:
        seqs, attempts = list(history.series("loss").seqs), history.attempts()
        states = [(case["alert"], case["state"], case["first_step"]) for case in history.incidents()]
    if seqs != list(range(STEPS)):
        missing = sorted(set(range(STEPS)) - set(seqs))
        found.append(f"history: {len(seqs)} rows of {STEPS} steps, missing {missing[:10]}")
    if states != [("High", "resolved", HIGH_FROM)]:
        found.append(f"incidents: {states}")
    if len(attempts) != 1 or attempts[0][2] is None:
        found.append(f"attempts: {attempts}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--last", action="store_true", help="one kill a run, at its end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=2.0, help="seconds that a run waits for a daemon at its end (2)"
    )
    parser.add_argument("--results", type=Path, help="a JSON line each run; a second start goes on after the last")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.patience)
        return
    done = (
        [json.loads(line) for line in arguments.results.read_text().splitlines()] if _exists(arguments.results) else []
    )
    while (len(done) if arguments.last else sum(one["kills"] for one in done)) < arguments.kills:
        total = sum(one["kills"] for one in done)
        seed = arguments.seed + len(done)
        killed, findings = trial(
            seed,
            1 if arguments.last else min(KILLS_A_RUN, arguments.kills - total),
            last=arguments.last,
            patience=arguments.patience,
        )
        done.append({"seed": seed, "kills": killed, "noticed": findings})
        print(json.dumps(done[-1]), flush=True)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    total = sum(one["kills"] for one in done)
    noticed = sum(bool(one["noticed"]) for one in done)
    print(f"{total} kills in {len(done)} runs: noticed in {noticed}")
    sys.exit(1 if noticed else 0)


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


if __name__ == "__main__":
    main()
