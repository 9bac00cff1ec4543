"""Combines the records of several ranks as the daemon does, and makes a reference from one process with all data."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from sentinel import wire
from sentinel.runs import Run
from sentinel.runs.steps import RunStep
from tests.programs import ranks
from tests.zygote import RANKS, TORCHRUN, run_fork

WORLD = 2
Layer = tuple[float, float, float]


class Expected(NamedTuple):
    """One step of the reference, which is one process with all data."""

    loss: float
    before: float
    after: float
    """Gradient norm before clipping (`before`) and after it."""
    layers: dict[str, Layer]
    """Layer -> (norm, minimum, maximum) of its gradient, after clipping."""
    unclipped: dict[str, Layer]
    weights: float
    """L2 norm of the weights after the step."""


def torchrun(module: str, folder: Path, ways: Sequence[str]) -> None:
    """Run one job for all ways, because starting it costs more than its work."""
    command = [*TORCHRUN, "--nproc-per-node", str(WORLD), "-m", module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_fork([*command, str(folder), *ways], RANKS, env=environment)
    assert done.returncode == 0, done.stderr
    assert "internal fault" not in done.stderr, done.stderr


def hellos(folder: Path, way: str) -> list[wire.Hello]:
    """Return the ranks' Hello messages."""
    return [message for file in _files(folder, way) for message in file[:1] if isinstance(message, wire.Hello)]


def combined(folder: Path, way: str) -> list[RunStep]:
    """Return the steps as the daemon closes them."""
    run = Run(way, way, 0.0)
    # The second rank comes first: nothing may depend on which rank is quicker.
    for file in reversed(_files(folder, way)):
        for message in file:
            if isinstance(message, wire.Hello):
                rank, _ = run.hello(message, 0.0)
            elif isinstance(message, wire.LayerTable):
                run.attempt.tables[message.digest] = message
            elif isinstance(message, wire.Batch):
                run.attempt.take(rank, message, 0.0)
    return list(run.attempt.take_closed(0.0))


def _files(folder: Path, way: str) -> list[list[wire.FromRank]]:
    paths = [folder / f"{way}.{rank}" for rank in range(WORLD)]
    return [[wire.from_rank(body) for body in wire.Frames().feed(path.read_bytes())] for path in paths]


@functools.cache
def reference(*, clip: bool) -> list[Expected]:
    """Return the steps of one process that has the whole model and all data."""
    net, found = ranks.model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=ranks.LEARNING_RATE)
    for batch in ranks.batches():
        optimizer.zero_grad()
        loss = ranks.loss_of(net, batch)
        loss.backward()
        before, unclipped = _norm(net), _layers(net)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), ranks.CLIP)
        after, clipped = _norm(net), _layers(net)
        optimizer.step()
        weights = math.sqrt(sum(p.detach().double().square().sum().item() for p in net.parameters()))
        found.append(Expected(loss.item(), before, after, clipped, unclipped, weights))
    return found


def _layers(net: nn.Module) -> dict[str, Layer]:
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: (grad.norm().item(), grad.min().item(), grad.max().item()) for name, grad in grads.items()}


def _norm(net: nn.Module) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in net.parameters() if p.grad is not None))


def layers_of(step: RunStep) -> dict[str, Layer]:
    """Return layer -> (norm, minimum, maximum) of its gradient, as the daemon has them."""
    assert step.layers is not None
    signals = ("layer_grad_norm", "layer_grad_min", "layer_grad_max")
    return {name: (of[signals[0]], of[signals[1]], of[signals[2]]) for name, of in step.layers.items()}
