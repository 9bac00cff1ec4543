"""A real training run in fp16 (on the CPU), with or without a real GradScaler.

python scaling.py collapse|settles|missing

collapse    from step 150 on a row is 0, and so is its length; 0 / 0 is masked in the loss, but not in its gradient
settles     starts with a scale 2^12 too high, and doubles the scale every 40 steps
missing     has no scaler
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch
from torch import nn

import sentinel

FAULT, STEPS = 150, 250


class Unit(nn.Module):
    """Normalises rows to length 1, except for rows of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(16, 32, bias=False)
        self.out = nn.Linear(32, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.lift(rows)
        unit = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-8)  # 1e-8 is 0 in fp16
        output: torch.Tensor = self.out(torch.where((rows == 0).all(-1, keepdim=True), 0.0, unit))
        return output


def main() -> None:
    kind = sys.argv[1]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Unit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=2.0**32 if kind == "settles" else 2.0**10,
        growth_interval=40 if kind == "settles" else 2000,
        enabled=kind != "missing",
    )
    monitor = sentinel.attach(model, optimizer, run=kind, scaler=scaler)
    deadline = time.monotonic() + 30
    while monitor.state == "looking for the daemon" and time.monotonic() < deadline:
        time.sleep(0.01)  # otherwise the run may end before a daemon on busy cores is up
    with contextlib.closing(open(1, "w", buffering=1, closefd=False)) as out:
        for step in range(STEPS):
            rows = torch.randn(64, 16)
            if kind == "collapse" and step >= FAULT:
                rows[0] = 0.0
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(model(rows).float(), rows.sum(-1, keepdim=True))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            print(step, scaler.get_scale(), file=out)


if __name__ == "__main__":
    main()
