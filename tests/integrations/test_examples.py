"""Every example runs as it is, and is watched."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sentinel.examples
from sentinel import wire
from tests.hooks.conftest import FakeDaemon
from tests.programs import uncompiled

EXAMPLES = Path(next(iter(sentinel.examples.__path__)))
TORCHRUN = ["-m", "torch.distributed.run"]
UNCOMPILED = [*TORCHRUN, str(Path(uncompiled.__file__))]
RUNS: list[Any] = [
    ("train_gpt", "torch", 40, []),
    ("ddp_loop", "torch", 128, TORCHRUN),
    ("fsdp2_loop", "torch", 128, TORCHRUN),
    ("lightning_fit", "lightning", 320, []),
    ("transformers_trainer", "transformers", 100, []),
    ("accelerate_loop", "accelerate", 64, []),
    ("deepspeed_loop", "deepspeed", 256, UNCOMPILED),
]
"""(example, its library, its number of steps, Python's arguments that launch it)."""
OPTIONS = {"train_gpt": ["--steps", "40"]}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "library", "steps", "launcher"),
    RUNS,
)
def test_an_example_is_watched_from_its_first_step_to_its_last(
    daemon: FakeDaemon, tmp_path: Path, name: str, library: str, steps: int, launcher: list[str]
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *OPTIONS.get(name, [])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert daemon.ended().reason in ("detach", "exit")
    assert daemon.of(wire.Hello)[0].identity.run == name
    losses = list(daemon.series("loss").values())
    assert len(losses) == steps
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_every_example_is_run() -> None:
    elsewhere = {"__init__", "lightning_restarted", "transformers_restarted"}  # test_restarted.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} - elsewhere == {getattr(run, "values", run)[0] for run in RUNS}
