"""Real ranks under torchrun, on gloo: what the daemon makes of their parts equals one process that has all of it."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sentinel import wire
from sentinel.runs import Run, Step
from tests.programs import ranks

WAYS = ("ddp", "ddp-clip", "fsdp", "fsdp-clip", "hsdp", "hsdp-clip")
WORLD = 2

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job for all ways: starting it costs more than what it does."""
    made = tmp_path_factory.mktemp("ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "-m", ranks.__name__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([*torchrun, str(made), *WAYS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def combined(folder: Path, way: str) -> list[Step]:
    """The steps as the daemon closes them."""
    files = [
        [wire.from_rank(body) for body in wire.Frames().feed((folder / f"{way}.{rank}").read_bytes())]
        for rank in range(WORLD)
    ]
    hellos = [file[0] for file in files]
    assert all(isinstance(hello, wire.Hello) for hello in hellos)
    assert len({hello.identity.run_id for hello in hellos}) == 1  # type: ignore[union-attr]
    facts = [hello.facts for hello in hellos]  # type: ignore[union-attr]
    wrapper = "DistributedDataParallel" if way.startswith("ddp") else "FSDP"
    assert [(fact["model"], fact["wrappers"]) for fact in facts] == [("Sequential", [wrapper])] * WORLD
    run = Run(way, way, 0.0)
    # The second rank is first: nothing may depend on who is quicker.
    for hello, file in reversed(list(zip(hellos, files, strict=True))):
        rank, _ = run.hello(hello, 0.0)  # type: ignore[arg-type]
        for message in file:
            if isinstance(message, wire.LayerTable):
                run.attempt.tables[message.digest] = message
            elif isinstance(message, wire.Batch):
                run.attempt.take(rank, message, 0.0)
    return run.attempt.closed(0.0)


@functools.cache
def reference(*, clip: bool) -> list[tuple[float, float, float, dict[str, tuple[float, float, float]]]]:
    """(loss, norm before clipping, norm after it, layer -> (norm, minimum, maximum)) of each step, in one process."""
    net, found = ranks.model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=ranks.LEARNING_RATE)
    for batch in ranks.batches():
        optimizer.zero_grad()
        loss = ranks.loss_of(net, batch)
        loss.backward()
        before = norm(net)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), ranks.CLIP)
        layers = {
            name: (p.grad.norm().item(), p.grad.min().item(), p.grad.max().item())
            for name, p in net.named_parameters()
            if p.grad is not None
        }
        found.append((loss.item(), before, norm(net), layers))
        optimizer.step()
    return found


def norm(net: nn.Module) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in net.parameters() if p.grad is not None))


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_the_whole_model(way: str, folder: Path) -> None:
    steps, expected = combined(folder, way), reference(clip=way.endswith("-clip"))
    assert [step.seq for step in steps] == list(range(ranks.STEPS))
    for step, (loss, before, after, layers) in zip(steps, expected, strict=True):
        assert step.run["loss"] == pytest.approx(loss, rel=1e-6)
        assert step.run["grad_norm"] == pytest.approx(before, rel=1e-6)
        assert step.run["grad_norm_applied"] == pytest.approx(after, rel=1e-6)
        assert step.layers is not None
        found = {
            name: (of["layer_grad_norm"], of["layer_grad_min"], of["layer_grad_max"])
            for name, of in step.layers.items()
        }
        assert found.keys() == layers.keys()
        for name, values in layers.items():
            assert found[name] == pytest.approx(values, rel=1e-6, abs=1e-6 * values[0]), name


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_same_to_the_bit_and_no_collective_is_added(way: str, folder: Path) -> None:
    for rank in range(WORLD):
        said = json.loads((folder / f"{way}.{rank}.json").read_text())
        assert said["same"]
        assert said["watched"] == said["bare"] > 0
