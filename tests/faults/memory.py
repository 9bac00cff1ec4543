"""Faults: memory that is not given back. A CUDA allocator's figures are made up, and logged as if they were real."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from sentinel.hooks.evidence import oom_report
from tests.faults.fault import Fault, Trial
from tests.faults.models import CONTEXT, Reader, classifier, deep, images, passages, read_loss

GB = 1e9
SPACING = 8
"""Steps between two samples of memory."""


def kept_losses(trial: Trial) -> None:
    """M1: losses.append(loss), which keeps the graph of each; the twin appends loss.item().

    A backward pass frees the tensors that the graph has saved: only a few hundred bytes per operation are left.
    """
    model = deep(8, 2**0.5, normed=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    monitor = trial.attach(model, optimizer)
    losses: list[Tensor | float] = []
    for (step, on), (x, y) in zip(trial.steps(2600), images(trial.seed), strict=False):
        if step > 1000:
            time.sleep(0.01)  # two counts take some seconds, which are only a few steps of a real loop
        loss = F.cross_entropy(model(x + 0.5 * torch.randn_like(x)), y)  # noise, so that they are not memorised by now
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss if on else loss.item())
    monitor.detach()  # while the objects that the daemon may ask about exist


def in_pieces(trial: Trial) -> None:
    """M2: the free pieces of split blocks grow until a cudaMalloc fails."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = trial.attach(model, optimizer)
    generator = torch.Generator().manual_seed(trial.seed)
    for (step, on), (x, y) in zip(trial.steps(1000, 600), images(trial.seed), strict=False):
        if step % SPACING == 0:
            allocated = (18 + float(torch.rand(1, generator=generator))) * GB
            pieces = 19 * GB if on else 1 * GB
            monitor.log(
                memory_allocated_bytes=allocated, memory_reserved_bytes=45 * GB, memory_inactive_split_bytes=pieces,
                allocation_retries=float(on and step > 700),
            )  # fmt: skip
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Passages(IterableDataset[Tensor]):
    """Batches of rows of a quarter to three quarters of the context's length; batch `at` has the length `longest`."""

    def __init__(self, seed: int, at: int, longest: int) -> None:
        self.seed, self.at, self.longest = seed, at, longest

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        for number, rows in enumerate(passages(self.seed, 8)):
            length = int(torch.randint(CONTEXT // 4, 3 * CONTEXT // 4, (1,), generator=generator))
            yield rows[:, : self.longest + 1] if number == self.at else rows[:, : length + 1]


def long_sequence(trial: Trial) -> None:
    """M3: one batch with the full context; the memory of each batch is made up, and a cudaMalloc fails once."""
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    onset = 200
    data = Passages(trial.seed, trial.find_onset(onset), CONTEXT if trial.faulty else CONTEXT // 2)
    monitor = trial.attach(model, optimizer, loader=(loader := DataLoader(data, batch_size=None)))
    peak = retries = 0.0
    for (step, _), rows in zip(trial.steps(220, onset), loader, strict=False):
        peak = max(peak, 20 * GB + rows.numel() * 0.2 * GB)
        retries += peak > 70 * GB and retries == 0
        monitor.log(
            memory_allocated_bytes=20 * GB, memory_reserved_bytes=72 * GB, memory_inactive_split_bytes=1 * GB,
            memory_peak_bytes=peak, allocation_retries=retries,
        )  # fmt: skip
        if step > onset - 20:
            time.sleep(0.06)  # batches are examined every 50 ms: in a real loop, all of them
        optimizer.zero_grad()
        read_loss(model, rows).backward()
        optimizer.step()


CAPACITY_GIB, ALLOCATED_GIB = 79.2, 74.1
_MESSAGE = (
    "CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of {capacity} GiB of which 1.21 GiB is "
    "free. Of the allocated memory {allocated} GiB is allocated by PyTorch, and 1.90 GiB is reserved by PyTorch but "
    "unallocated."
)
"""The message as c10/cuda/CUDACachingAllocator.cpp writes it."""


class Hungry(nn.Module):
    """A classifier whose forward pass fails for lack of memory while `full` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.full = classifier(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.full:
            raise torch.OutOfMemoryError(_MESSAGE.format(capacity=CAPACITY_GIB, allocated=ALLOCATED_GIB))
        output: Tensor = self.net(x)
        return output


def ran_out(trial: Trial) -> None:
    """M4: an allocation in the forward pass fails. The exception's figures are made up, as a CPU has none."""
    model, own = Hungry(), oom_report._on_host
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    message = _MESSAGE.format(capacity=CAPACITY_GIB, allocated=ALLOCATED_GIB)
    oom_report._on_host = lambda: oom_report._on_device(message)
    try:
        with trial.attach(model, optimizer):
            for (_, on), (x, y) in zip(trial.steps(100, 60), images(trial.seed), strict=False):
                model.full = on
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except torch.OutOfMemoryError:
        trial.onset -= 1  # the last step that was made
    finally:
        oom_report._on_host = own


_MADE_UP = "the caching allocator's numbers"

FAULTS = (
    Fault(
        id="M1", what="losses.append(loss)", alert="MemoryCreep", signal="memory_held_bytes", delay=2560,
        loop=kept_losses,
        cause="losses, a local of kept_losses .*memory\\.py:\\d+. keeps.*resident set grows by [\\d.]+ kB a step",
        names=("with the graph that made it", "put loss.item\\(\\)"), begins=True,
    ),
    Fault(
        id="M2", what="free memory in pieces", alert="Fragmentation", signal="memory_reserved_bytes", delay=50,
        loop=in_pieces, cause="in pieces that fit no request", names=("expandable_segments:True", "19 GB in free"),
        synthetic=_MADE_UP, begins=True,
    ),
    Fault(
        id="M3", what="one long sequence", alert="MemoryPressure", signal="memory_reserved_bytes", delay=0,
        loop=long_sequence, cause="a batch that is larger.*of length 33.*the peak grows by", synthetic=_MADE_UP,
        begins=True,
    ),
    Fault(
        id="M4", what="an allocation that fails", alert="OutOfMemory", signal="loss", delay=0, loop=ran_out,
        cause="activations and the rest are the largest part.*asked for 6.44 GB in the forward pass at .*memory\\.py",
        names=("parameters [\\d.]+ kB", "gradients [\\d.]+ kB", "optimizer states [\\d.]+ kB", "idle pieces",
               "half of the micro-batch"),
        synthetic=_MADE_UP, begins=True,
    ),
)  # fmt: skip
