"""Faults: hardware that fails, as NVML would report it; made up by a fake driver that the daemon loads."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pynvml
import torch
import torch.nn.functional as F

from sentinel.hooks.session import attach
from tests.collect.fake_nvml import FakeNvml
from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, images

XID = 48
"""XID of a double-bit ECC error."""
STEP_SECONDS, ONSET = 0.05, 110


def reported(trial: Trial, state: dict[str, int], seconds: float) -> None:
    """Train for some seconds on a made-up GPU 0, whose driver reports `state` from the 110th step on.

    By then the daemon has opened the driver, which takes about four seconds from the first rank's arrival.
    """
    file = Path(os.environ["FAKE_STATE"])
    file.unlink(missing_ok=True)
    attach.gpus = lambda models: (FakeNvml().boards[0].uuid.removeprefix("GPU-"),)  # as CUDA would
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, on), (x, y) in zip(trial.steps(int(seconds / STEP_SECONDS), ONSET), images(trial.seed), strict=False):
        if on and step == ONSET:
            file.write_text(json.dumps(state))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(STEP_SECONDS)
    file.unlink(missing_ok=True)


def broken_memory(trial: Trial) -> None:
    """H1: an XID for a memory error."""
    reported(trial, {"xid": XID}, 9.0)


def hot(trial: Trial) -> None:
    """H2: heat holds the clocks down."""
    reported(trial, {"reasons": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown}, 28.0)


_MADE_UP = "NVML's answers"

FAULTS = (
    Fault(
        id="H1", what="a double-bit error", alert="GpuFault", signal="seconds", delay=5, loop=broken_memory,
        cause="GPU 0: XID 48, double-bit ECC error", names=("on it rank 0", "drain node"), synthetic=_MADE_UP,
        own_pace=True,
    ),
    Fault(
        id="H2", what="heat", alert="GpuThrottled", signal="seconds", delay=60, loop=hot,
        cause="clocks of GPU 0 are held down by heat", names=("on it rank 0", "MHz"), synthetic=_MADE_UP,
        own_pace=True,
    ),
)  # fmt: skip
