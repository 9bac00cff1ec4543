"""Tensors in memory that cannot be written to: a restore must not write there, as that would end the process.

So each test has a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.zygote import TRAINING, run_fork

ROOT = Path(__file__).parents[2]
BEGUN = """
import warnings
from pathlib import Path
import numpy
import torch
from torch import nn
from tests.rollback.test_disk import again, armed, write
from tests.rollback.training import Training, batches, of_type, roll_back
from sentinel import wire

folder = Path("{folder}")

def mapped(value):
    numpy.save(folder / f"table{value}.npy", numpy.full((1000, 4), value, dtype=numpy.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(numpy.load(folder / f"table{value}.npy", mmap_mode="r"))

def make():
    training = Training()
    {make}
    return training

training = make()
restorer, sent = armed(training, folder / "snapshots")
for seq, batch in enumerate(batches(9)):
    if seq == 8:
        print("written", write(restorer, sent, 5).ok)
        {meddle}
        roll_back(restorer, at=8, to=5)
    training.step(batch)
restorer.close()
print(*[(one.ok, one.reason) for one in of_type(sent, wire.RolledBack)])
print(*training.model.table.flatten()[:1].tolist())
print("resumed at", again(make(), folder / "snapshots"))
"""
BUFFER = 'training.model.register_buffer("table", mapped({value}), persistent=False)'
WEIGHT = 'training.model.register_parameter("table", nn.Parameter(mapped(1.0), requires_grad=False))'
BACK = "(True, '')"
REFUSED = "table cannot be written to, or shares its memory with another by now"


@pytest.mark.sampled(2)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "meddle", "answer", "value"),
    [
        (BUFFER.replace("{value}", "1.0"), "", BACK, "1.0"),
        (BUFFER.replace("{value}", "numpy.nan"), "", BACK, "nan"),
        (BUFFER.replace("{value}", "1.0"), "training.model.table = mapped(2.0)", BACK, "1.0"),
        (WEIGHT, "", BACK, "1.0"),
        (WEIGHT, "training.model.table.data = mapped(2.0)", REFUSED, "2.0"),
    ],
    ids=["buffer", "not finite", "another buffer", "weight", "another weight"],
)
def test_nothing_is_written_to_memory_that_cannot_be_written_to(
    make: str, meddle: str, answer: str, value: str, tmp_path: Path
) -> None:
    code = BEGUN.replace("{folder}", str(tmp_path)).replace("{make}", make).replace("{meddle}", meddle)
    done = run_fork([sys.executable, "-c", code], TRAINING, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    written, said, first, resumed = done.stdout.splitlines()
    assert written == "written True"
    assert answer in said
    assert first == value
    assert resumed == "resumed at 6"
