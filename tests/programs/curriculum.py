"""A run with rollback whose task changes to a much harder one half-way, announced by a stage or only by a phase.

    python curriculum.py stage|phase

Prints each rollback, and `done` at its end.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import sentinel

EASY, HARD = 500, 600


def main(how: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    truth = torch.randn(16, 1)
    rollback = sentinel.Rollback(every=100, margin=50, keep=2, budget=3)
    monitor = sentinel.attach(net, optimizer, run="curriculum", rollback=rollback)
    monitor.on_rollback(lambda to, at: print("rolled back", to, at, flush=True))
    deadline = time.monotonic() + 60
    while monitor.state != "streaming" and time.monotonic() < deadline:
        time.sleep(0.01)
    for step in range(EASY + HARD):
        if step == EASY:
            if how == "stage":
                monitor.stage("with sines")
            else:
                with monitor.phase("with sines"):
                    pass
        x = torch.randn(64, 16)
        y = x @ truth + (3 * torch.sin(3 * x).sum(1, keepdim=True) if step >= EASY else 0)
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.003)
    monitor.detach()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
