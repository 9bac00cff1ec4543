"""Checks that `sentinel demo` of the README names its cause, on an idle machine and on a fully busy one.

Each seed draws other weights, other data, and another step at which the data go bad. In every second trial a program
on each core computes without a break.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

TRIALS = 20
SAMPLE = ()
"""Empty: tests/demo runs the demo each time."""
CASES = ("idle", "busy")


@contextlib.contextmanager
def occupy_cores() -> Iterator[None]:
    """Run a program on each core that computes without a break. It ends with this process, even a killed one."""
    spin = [sys.executable, "-c", f"import os\nwhile os.getppid() == {os.getpid()}: pass"]
    busy = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run_trial(seed: int) -> dict[str, Any]:
    """Run the demo; check that LossSpike fires, names the first bad batch as its cause, and the run is saved."""
    case = CASES[seed % len(CASES)]
    with tempfile.TemporaryDirectory() as folder, occupy_cores() if case == "busy" else contextlib.nullcontext():
        command = [sys.executable, "-m", "sentinel", "demo", "--seed", str(seed), "--json", "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    first, alert = shown["damaged_batches"]["first"], shown["alert"]
    assert shown["saved"], shown
    assert alert["alert"] == "LossSpike", alert
    assert alert["cause"].startswith(f"the batch of step {first}"), f"{first}: {alert['cause']}"
    return {"case": case, "delay": alert["step"] - first, "seconds": shown["seconds"]}
