"""Measures how long `import sentinel`, `sentinel --help` and `attach` with a daemon to start take.

    python -m bench.start

Bars: import under 50 ms and without torch, --help under 0.25 s; attach under 0.3 s, and the daemon's start does not
hold the loop up. Each figure is the median of whole processes; an import's is paired with a bare interpreter's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 15

ATTACH = """
import os, sys, tempfile, time
import torch, sentinel
sentinel.attach  # the import of the hooks is the loop's own affair: it comes with the first line
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(50)])
optimizer = torch.optim.AdamW(model.parameters())
began = time.perf_counter()
monitor = sentinel.attach(model, optimizer)
print(time.perf_counter() - began)
monitor.detach()
"""


def seconds(*command: str) -> float:
    """Return the wall time of one process, in seconds."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd="/")
    return time.perf_counter() - began


def median(*command: str) -> float:
    return statistics.median(seconds(*command) for _ in range(RUNS))


def measure_added(python: str, statement: str) -> float:
    """Return the seconds that a statement adds to a bare interpreter, measured in pairs so that drifts cancel out."""
    return statistics.median(seconds(python, "-c", statement) - seconds(python, "-c", "pass") for _ in range(RUNS))


def main() -> None:
    python = sys.executable
    with tempfile.TemporaryDirectory() as places:
        environment = {
            "SENTINEL_RUNTIME": places + "/run",
            "SENTINEL_STATE": places + "/state",
            "PATH": "/usr/bin:/bin",
        }
        attach = statistics.median(
            float(
                subprocess.run(
                    [python, "-c", ATTACH], check=True, capture_output=True, text=True, cwd="/", env=environment
                ).stdout
            )
            for _ in range(5)
        )
    rows = [
        ("bare interpreter", median(python, "-c", "pass"), None),
        ("import sentinel", measure_added(python, "import sentinel"), 0.05),
        ("sentinel --help", median(str(Path(python).with_name("sentinel")), "--help"), 0.25),
        ("attach(), 50 layers", attach, 0.3),
    ]
    for name, value, bar in rows:
        print(f"{name:<24} {value * 1000:7.1f} ms" + (f"   bar {bar * 1000:.0f} ms" if bar else ""))


if __name__ == "__main__":
    main()
