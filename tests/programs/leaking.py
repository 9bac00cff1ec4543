"""A real training run that keeps something from step to step, or keeps nothing.

python leaking.py graph|outputs|mean|nothing|cycles|evaluations STEPS [census]     census: goes on until an alert has it
"""

from __future__ import annotations

import itertools
import sys
import threading
import time

import torch
from torch import nn

import sentinel


class Keeper:
    """Keeps what loops may keep. Only `graph`, `outputs` and `mean` grow."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self.kind, self.model = kind, model
        self.kept: list[object] = []
        self.mean: torch.Tensor | float = 0.0

    def __call__(self, step: int, output: torch.Tensor, loss: torch.Tensor) -> None:
        if self.kind == "graph":
            self.kept.append(loss)  # and its graph
        elif self.kind == "outputs":
            self.kept.append(output.detach()[:, 0])  # a view, which keeps the whole tensor
        elif self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * loss  # a chain of all graphs
        elif self.kind == "cycles":
            garbage: list[object] = [torch.empty(5000)]
            garbage.append(garbage)  # kept until the next garbage collection
        elif self.kind == "evaluations" and step % 150 == 149:
            with torch.no_grad():
                self.model(torch.randn(2048, 64))


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keep = Keeper(kind, model)
    monitor = sentinel.attach(model, optimizer, run=kind, overhead=1.0)  # every 8th step is sampled
    deadline = time.monotonic() + 30
    while monitor.state == "looking for the daemon" and time.monotonic() < deadline:
        time.sleep(0.01)  # otherwise the run may end before a daemon on busy cores is up
    counted = threading.Event()
    monitor.on_alert(lambda alert: counted.set() if alert["census"] else None)
    deadline = time.monotonic() + (60 if "census" in sys.argv else 0)
    for step in itertools.count():
        if step >= steps and (counted.is_set() or time.monotonic() > deadline):
            break
        x = torch.randn(256, 64)
        output = model(x)
        loss = nn.functional.mse_loss(output, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(step, output, loss)


if __name__ == "__main__":
    main()
