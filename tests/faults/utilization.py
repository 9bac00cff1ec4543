"""Fault: a GPU that idles, as a made-up NVML reports it, with the rule's time running 20 times as fast.

The rule looks at six minutes; here its windows and the daemon's spacing of readings are 20 times shorter, and nothing
else is changed.


    python -m tests.faults.utilization daemon ...       the daemon, with its readings at that pace
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sentinel.daemon import machine
from sentinel.daemon.run import ingest
from sentinel.rulebook import loader
from tests.collect.fake_nvml import FakeNvml
from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, images

QUICKER = 20
READING_SECONDS = machine.READ_SECONDS / QUICKER
SECONDS = 30.0
"""Seconds of training: more than the window of 18, by what a busy machine may take to start its daemon."""
BUSY = 12
"""Per cent of the time for which the GPU is busy."""


def rule() -> str:
    """Return the stock rule, with shorter windows."""
    stock = dict(loader.stock())["sentinel/rules/throughput.yaml"]
    found = re.search(r"  - alert: LowUtilization\n.*?(?=\n  - alert: |\Z)", stock, re.S)
    assert found is not None
    return "group: quicker\nrules:\n" + re.sub(r"\b(\d+)m\b", lambda m: f"{int(m[1]) * 60 // QUICKER}s", found[0])


class Deep(nn.Module):
    """A classifier whose forward pass takes 5 ms on the host whatever the batch, as in a model of many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def forward(self, x: Tensor) -> Any:
        time.sleep(0.005)
        return self.net(x)


def hardly_used(trial: Trial) -> None:
    """T2: a batch of four; the host is busy all the time, and the GPU for an eighth of it."""
    from sentinel.hooks.session import attach

    file = Path(os.environ["FAKE_STATE"])
    file.write_text(json.dumps({"busy": BUSY} if trial.faulty else {}))
    attach.gpus = lambda models: (FakeNvml().boards[0].uuid.removeprefix("GPU-"),)  # as CUDA would
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # with batches of four, a larger rate leads to outliers
    trial.attach(model, optimizer)
    end = time.monotonic() + SECONDS
    batches = itertools.takewhile(lambda _: time.monotonic() < end, images(trial.seed, 4 if trial.faulty else 64))
    for (_, _), (x, y) in zip(trial.steps(1 << 30), batches, strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    file.unlink()


FAULTS = (
    Fault(
        id="T2", what="a batch of four", alert="LowUtilization", signal="readings", delay=100, loop=hardly_used,
        cause="the batch is too small", names=("the GPU is busy for 12%", "larger batch"), synthetic="NVML's answers",
        own_pace=True,
    ),
)  # fmt: skip


if __name__ == "__main__":
    from sentinel.cli import main

    machine.READ_SECONDS = READING_SECONDS
    ingest.DEVICES_SECONDS = 0.0  # the history has each reading: the delay is counted in them
    main()
