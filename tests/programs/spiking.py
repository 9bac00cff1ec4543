"""A real training run that is wrecked from one step on: by 20 batches of corrupted data at a harmful rate, or by one
batch with NaN. After one the weights are NaN, and a quick daemon would use up its rollbacks during 20.

    python spiking.py [--nan]

Prints one JSON object per step: step, loss, and at the end the steps of rollbacks. While it is watched, it goes on
until it has been rolled back, and then for as many steps as it had left.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import sentinel

FAULT, LENGTH, STEPS = 400, 20, 700
MOST_STEPS = 20_000
"""Most steps: on busy cores the daemon's order may come seconds after the fault."""


def batches(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    truth = torch.randn(64, 10, generator=torch.Generator().manual_seed(2))
    x = torch.randn(128, 64, generator=generator)
    return x, (x @ truth).argmax(1)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(model, optimizer, run="spiking", rollback=sentinel.Rollback(every=50, keep=4, margin=20))
    deadline = time.monotonic() + 30
    while monitor.state in ("looking for the daemon", "saying hello") and time.monotonic() < deadline:
        time.sleep(0.01)  # otherwise the run may end before a daemon on busy cores is up
    rollbacks: list[int] = []
    monitor.on_rollback(lambda *_: rollbacks.append(step))
    for step in range(MOST_STEPS):
        if step >= STEPS and (monitor.state != "streaming" or (rollbacks and step >= rollbacks[-1] + STEPS - FAULT)):
            break
        x, y = batches(generator)
        if "--nan" in sys.argv:
            if step == FAULT:
                x[0] = torch.nan
        elif FAULT <= step < FAULT + LENGTH:
            x, y = x * 50, torch.zeros_like(y)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
    print(json.dumps({"rollbacks": rollbacks, "finite": all(p.isfinite().all().item() for p in model.parameters())}))


if __name__ == "__main__":
    main()
