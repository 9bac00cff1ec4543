"""A real training run that takes memory at a given rate, and may have 2 GB more than at its start (`ulimit -d`).

python filling.py KIND STEPS SECONDS [ONSET]    KIND: bytes per step; or the name of a healthy loop's way to take memory
"""

from __future__ import annotations

import mmap
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import sentinel

FREE = 2_000_000_000
MB = 1_000_000


def main() -> None:
    kind, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    onset = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())))
    if kind == "adam":
        model.extend([nn.Linear(64, 2500), nn.Linear(2500, 2500)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + FREE, resource.RLIM_INFINITY))
    monitor = sentinel.attach(model, optimizer, run=kind)
    deadline = time.monotonic() + 30
    while monitor.state == "looking for the daemon" and time.monotonic() < deadline:
        time.sleep(0.01)
    counted = threading.Event()
    monitor.on_alert(lambda alert: counted.set() if alert["census"] else None)
    kept: list[torch.Tensor] = []
    with tempfile.TemporaryFile() as file:
        file.truncate(600 * MB)
        pages = mmap.mmap(file.fileno(), 600 * MB, access=mmap.ACCESS_READ)
    for step in range(steps):
        x = torch.randn(int(torch.randint(64, 4096, ())) if kind == "batches" else 256, 64)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        since = step - onset
        if kind == "ten" and 0 <= since < 10:
            kept.append(torch.ones(100 * MB // 4))
        elif kind == "sawtooth" and since >= 0:
            kept.append(torch.ones(MB // 4))
            if len(kept) == 150:
                kept.clear()
        elif kind == "pagecache" and since >= 0:
            at = since % 600 * MB
            _ = pages[at : at + MB]
        elif kind == "evaluation" and since == 0:
            with torch.no_grad():
                kept.append(model(torch.randn(1_000_000, 64)))
        elif kind[0].isdigit() and since >= 0:
            kept.append(torch.ones(int(float(kind)) // 4))
        if counted.is_set():
            break
        time.sleep(seconds)


if __name__ == "__main__":
    main()
