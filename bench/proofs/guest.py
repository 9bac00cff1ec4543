"""Checks that every signal comes back after two seconds without resources, in which the daemon is killed.

    files     no file descriptor is free
    memory    allocations for the statistics of gradients fail, as on a full GPU
    both      files and memory
    begin     no file descriptor is free when `attach` is called

A real training process, its own daemon, SIGKILL. A signal is back if a step that ended within `BACK_SECONDS` of the
trouble's end has it; the same holds for the layers' signals. It is only counted whether the history says what was not
seen: a daemon that is killed in the same second has not written it.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TRIALS = 12
SAMPLE = (0,)
TROUBLE_SECONDS = 2.0
BACK_SECONDS = 30.0
STEPS = 400
"""Steps before the trouble."""
OFTEN = 3
"""A signal that was seen this often before the trouble must come back."""
CASES = ("files", "memory", "both", "begin")


def train(case: str) -> None:
    """Train the run; print when the trouble begins and when it is over, and end once the file `end` exists."""
    import torch

    import sentinel
    from sentinel.hooks.measure.gradients import Gradients

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    until = time.monotonic() + TROUBLE_SECONDS
    restored = _without_descriptors() if case == "begin" else None
    with sentinel.attach(model, optimizer, run="guest", overhead=1.0) as monitor:
        begin, end = (Path(sys.argv[2]) / name for name in ("begin", "end"))
        step, trouble, real = 0, "" if case != "begin" else "begun", Gradients.__init__
        while not end.exists():
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            time.sleep(0.003)
            step += monitor.state == "streaming" or trouble != ""
            if step == STEPS and case != "begin":
                print(json.dumps({"ready": True}), flush=True)
            if not trouble and step >= STEPS and begin.exists():
                trouble, until = "begun", time.monotonic() + TROUBLE_SECONDS
                if case in ("files", "both"):
                    restored = _without_descriptors()
                if case in ("memory", "both"):
                    Gradients.__init__ = _no_memory  # type: ignore[method-assign]
                print(json.dumps({"begun": time.time()}), flush=True)
            elif trouble == "begun" and time.monotonic() > until:
                trouble, Gradients.__init__ = "over", real  # type: ignore[method-assign]
                if restored is not None:
                    resource.setrlimit(resource.RLIMIT_NOFILE, restored)
                print(json.dumps({"over": time.time(), "begun": time.time() - TROUBLE_SECONDS}), flush=True)


def _without_descriptors() -> tuple[int, int]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    return limits


def _no_memory(*_: object) -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


def run_trial(seed: int) -> dict[str, Any]:
    """Run one case; except in `begin`, the daemon is killed at a moment of the trouble that the seed chooses."""
    case, chance = CASES[seed % len(CASES)], random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="guest-") as folder:
        places = {"SENTINEL_RUNTIME": f"{folder}/r", "SENTINEL_STATE": f"{folder}/s", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **places, "PYTHONPATH": str(Path(__file__).parents[2])}
        environment.pop("SENTINEL_ADDRESS", None)
        command = [sys.executable, "-m", "bench.proofs.guest", case, folder]
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            said = json.loads(child.stdout.readline())
            if "ready" in said:
                daemon = _daemon(environment)
                (Path(folder) / "begin").touch()
                said = json.loads(child.stdout.readline())
                time.sleep(chance.uniform(0.0, TROUBLE_SECONDS * 0.8))
                os.kill(daemon, signal.SIGKILL)
                said |= {"over": json.loads(child.stdout.readline())["over"]}
            seconds = _until_back(Path(folder) / "s", said["begun"], said["over"])
            (Path(folder) / "end").touch()
            assert child.wait(60) == 0
            kept = _read_kept(Path(folder) / "s")
        finally:
            child.kill()
            child.communicate()
        lacking = _lacking(kept, said["begun"], said["over"])
        assert not lacking, f"{case}: not back within {BACK_SECONDS:g} s: {sorted(lacking)}"
        return {
            "case": case,
            "signals": len(kept["rows"]),
            "seconds_until_all_were_back": round(seconds, 1),
            "told_in_the_history": int(any(kept["unseen"])),
        }


def _daemon(environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "sentinel", "status"]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    found = re.search(r"^daemon (\d+),", asked.stdout, re.MULTILINE)
    assert found is not None, asked
    return int(found[1])


def _read_kept(state: Path) -> dict[str, Any]:
    """Return the times at which each signal of ranks or layers was seen, and what the history says was not seen."""
    from sentinel.store.reader import History

    rows: dict[str, list[float]] = {}
    unseen: list[Any] = []
    for path in state.glob("runs/*.sqlite"):
        with History(path) as history:
            for number, *_ in history.attempts():
                for step in history.steps(attempt=number):
                    names = [*step.run, *(step.layers.stats if step.layers is not None else ())]
                    for name in names:
                        rows.setdefault(name, []).append(step.time)
            unseen += [event.detail["what"] for event in history.events("not seen")]
    return {"rows": rows, "unseen": unseen}


def _lacking(kept: dict[str, Any], begun: float, over: float) -> set[str]:
    usual = {name for name, times in kept["rows"].items() if sum(at < begun for at in times) >= OFTEN}
    usual = usual or {"loss", "grad_norm", "rss_bytes", "layer_grad_norm"}
    back = {name for name, times in kept["rows"].items() if any(over < at < over + BACK_SECONDS for at in times)}
    return usual - back - {"opening_step"}  # a signal of a run's first steps only


def _until_back(state: Path, begun: float, over: float) -> float:
    while _lacking(_read_kept(state), begun, over) and time.time() < over + BACK_SECONDS:
        time.sleep(1.0)
    return time.time() - over


if __name__ == "__main__":
    train(sys.argv[1])
