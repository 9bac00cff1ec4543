"""A healthy training run, watched from its first step to its last.

    python steady.py [STEPS [SECONDS [FILE]]]

Waits at most SECONDS until the daemon answers, or it is known that there is none, and goes on until FILE is there; at
its end it prints the monitor's state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import sentinel


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(model, optimizer, run="steady")
    deadline = time.monotonic() + (float(sys.argv[2]) if len(sys.argv) > 2 else 30)
    while monitor.state in ("looking for the daemon", "saying hello") and time.monotonic() < deadline:
        time.sleep(0.01)
    least = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    released = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    steps = 0
    while steps < least or not (released is None or released.exists()):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)
        steps += 1
    end = {"state": monitor.state, "steps": steps, "uid": os.getuid(), "children": has_children()}
    print(json.dumps(end), flush=True)


def has_children() -> bool:
    """Return whether the process has children, for which a loop that waits for all of them would wait."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    main()
