"""A healthy run that trains until its stdin is closed, and prints how many steps it took."""

from __future__ import annotations

import select
import sys

import torch

import sentinel


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sentinel.attach(model, optimizer, run="lasting")
    steps = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        x = torch.randn(128, 64)
        loss = torch.nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    print(steps)


if __name__ == "__main__":
    main()
