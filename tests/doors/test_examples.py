"""The examples of the doors run as they are, and are seen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sentinel.examples
from sentinel import wire
from tests.hooks.conftest import FakeDaemon

EXAMPLES = Path(next(iter(sentinel.examples.__path__)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "library", "steps"),
    [
        ("lightning_fit", "lightning", 320),
        ("transformers_trainer", "transformers", 100),
        ("accelerate_loop", "accelerate", 64),
    ],
)
def test_an_example_is_watched_from_its_first_step_to_its_last(
    daemon: FakeDaemon, tmp_path: Path, name: str, library: str, steps: int
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert daemon.ended().reason in ("detach", "exit")
    assert daemon.of(wire.Hello)[0].identity.run == name
    losses = list(daemon.series("loss").values())
    assert len(losses) == steps
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
