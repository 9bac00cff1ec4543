"""Trains a small network, and at step 40 allocates more than any machine has: the exception ends the process."""

from __future__ import annotations

import time

import torch
from torch import nn

import sentinel

AT, HUGE = 40, 1 << 50


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sentinel.attach(model, optimizer, run="exhausting")
    deadline = time.monotonic() + 30
    while monitor.state != "streaming" and time.monotonic() < deadline:
        time.sleep(0.01)  # otherwise it may end before a daemon on busy cores is up
    for step in range(2 * AT):
        loss = model(torch.randn(32, 64)).square().mean()
        if step == AT:
            loss = loss + torch.empty(HUGE).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
