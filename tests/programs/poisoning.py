"""Trains a small network in which WHAT makes a NaN at step 40: poisoning.py WHAT

operation   the square root of 0 in the middle, whose derivative is infinite
data        a sample that is not finite
targets     the logarithm of 0 in the loss
"""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn

import sentinel

AT, STEPS = 40, 60


class Middle(nn.Module):
    """Takes square roots of numbers a little above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (x * (x > 0) + self.epsilon).sqrt()


def main(what: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Middle(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with sentinel.attach(model, optimizer, run="poisoning", overhead=1.0) as monitor:
        deadline = time.monotonic() + 30
        while monitor.state != "streaming" and time.monotonic() < deadline:
            time.sleep(0.01)  # otherwise it may end before a daemon on busy cores is up
        for step in range(STEPS):
            batch = torch.randn(32, 8)
            target = batch.square().mean(1, keepdim=True)
            if step == AT and what == "operation":
                model[1].epsilon = 0.0
            if step == AT and what == "data":
                batch[3, 5] = torch.nan
            optimizer.zero_grad()
            loss = (model(batch) - target).square().mean()
            if step == AT and what == "targets":
                loss = loss + (target - target).log().mean()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
