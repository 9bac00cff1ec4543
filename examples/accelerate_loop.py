"""A custom training loop with Accelerate and gradient accumulation; Sentinel is attached by one call.

pip install accelerate
accelerate launch examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sentinel.hooks.accelerate import attach


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    with attach(accelerator, model, optimizer, loader=loader):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
