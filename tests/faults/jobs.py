"""Faults in real jobs of two ranks under torchrun, on gloo."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, images

RANKS = 2
NETWORK_SECONDS, STEP_SECONDS, LATE_SECONDS = 0.06, 0.03, 0.04


def _slowly(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Return the mean over the ranks, delayed as by a slow network."""
    reduced = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True).get_future()

    def arrived(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        time.sleep(NETWORK_SECONDS)
        return future.value()[0]

    return reduced.then(arrived)


def slow_network(trial: Trial) -> None:
    """T3: the reduction of gradients takes 60 ms, as for a model of some 100 M parameters over 10 Gbit/s.

    gloo reduces the bytes; the rest of the time is slept, so that it does not depend on the machine's load.
    """
    model = DistributedDataParallel(classifier())
    if trial.faulty:
        model.register_comm_hook(None, lambda _, bucket: _slowly(bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trial.attach(model, optimizer)
    dist.barrier()
    for (_, _), (x, y) in zip(trial.steps(40), images(trial.seed + 100 * dist.get_rank()), strict=False):
        optimizer.zero_grad()
        output = model(x)
        time.sleep(STEP_SECONDS)
        F.cross_entropy(output, y).backward()
        optimizer.step()
    dist.barrier()


class Late(nn.Module):
    """A classifier whose forward pass sleeps, and sleeps longer while `late` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.late = classifier(), False

    def forward(self, x: Tensor) -> Any:
        time.sleep(STEP_SECONDS + LATE_SECONDS * self.late)
        return self.net(x)


def slow_rank(trial: Trial) -> None:
    """T5: rank 1 takes 40 ms longer for its forward pass from a step on."""
    net = Late()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trial.attach(model, optimizer)
    dist.barrier()
    for (_, on), (x, y) in zip(trial.steps(130, 80), images(trial.seed + 100 * dist.get_rank()), strict=False):
        net.late = on and dist.get_rank() == 1
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.barrier()


FAULTS = (
    Fault(
        id="T3", what="60 ms for the reduction of gradients", alert="CommunicationBound",
        signal="communication_seconds", delay=50, loop=slow_network,
        cause="\\d\\d% of each step .* is the reduction of gradients .* among 2 ranks; passes a step: 1,",
        names=("no_sync\\(\\)", "larger batch"), synthetic="the network's time",
        own_pace=True,
    ),
    Fault(
        id="T5", what="a rank that is 40 ms late", alert="Straggler", signal="step_seconds", delay=30, loop=slow_rank,
        cause="rank 1, on \\S+, takes \\d+ ms a step longer than the quickest rank, mostly for its forward pass, since",
        names=("clocks",),
        own_pace=True,
    ),
)  # fmt: skip
