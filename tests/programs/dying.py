"""Trains a small network whose loss explodes at step 150, and raises three steps later."""

from __future__ import annotations

import time

import torch
from torch import nn

import sentinel

AT = 150


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    monitor = sentinel.attach(model, optimizer, run="dying")
    deadline = time.monotonic() + 30
    while monitor.state != "streaming" and time.monotonic() < deadline:
        time.sleep(0.01)  # otherwise it may end before a daemon on busy cores is up
    for step in range(AT + 3):
        loss = (model(torch.randn(32, 64)) - 1).square().mean() * (1e4 if step >= AT else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise RuntimeError("it goes on no more")


if __name__ == "__main__":
    main()
