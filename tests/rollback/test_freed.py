"""Memory that the loop frees while a snapshot of it is being copied.

Reading it after that would kill the process, so each test has a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from sentinel.hooks.snapshot import host_buffer
from sentinel.hooks.snapshot.host_buffer import copy_bytes, copy_strided
from tests.zygote import TRAINING, run_fork

ROOT = Path(__file__).parents[2]
BEGUN = """
import torch
from torch import nn
from sentinel.errors import RollbackError
from sentinel.hooks.snapshot.snapshot import Ring, Snapshot
from sentinel.hooks.snapshot.training_state import Weights
from tests.rollback.training import Parts

Snapshot.beside = True  # as on a GPU
said = set()
for _ in range(4):
    net = nn.Linear(4096, 4096)  # 64 MB: the copy has begun when the next line runs, and is not over
    net.weight.data = {weight}
    ring = Ring(Parts(Weights([net], [])), keep=2, margin=1, afford=lambda nbytes: None)
    ring.make_room(0)
    ring.begin(0)
    {line}
    try:
        snapshot, torn = ring.settle()
        said.add("torn" if torn else "kept")
    except RollbackError as error:
        said.add(str(error))
print(*sorted(said), sep="\\n")
"""


def begun(line: str, weight: str) -> set[str]:
    """Return what became of snapshots during whose copy the loop ran this line."""
    code = BEGUN.replace("{line}", line).replace("{weight}", weight)
    done = run_fork([sys.executable, "-c", code], TRAINING, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize("line", ["net.weight.untyped_storage().resize_(0)", "net.share_memory()"])
@pytest.mark.parametrize("weight", ["net.weight.data", "torch.randn(4096, 8192)[:, ::2]"], ids=["dense", "with gaps"])
def test_weights_whose_memory_is_freed_between_two_steps_end_no_run(line: str, weight: str) -> None:
    """The first torch.multiprocessing queue that weights are put into moves them as `share_memory()` does."""
    gone = "a snapshot could not be copied: the memory of weight was taken away between two steps"
    assert begun(line, weight) <= {gone, "torn"}


def test_long_copies_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "_LONGEST", 1000)
    source, to = torch.arange(5000, dtype=torch.uint8), torch.zeros(5002, dtype=torch.uint8)
    assert copy_bytes(to[1:].data_ptr(), source.data_ptr(), 5000)
    assert torch.equal(to[1:-1], source)
    assert (to[0], to[-1]) == (0, 0)


WIDE = torch.arange(6000.0).reshape(20, 30, 10)


@pytest.mark.parametrize(
    "source",
    [
        WIDE[::2, 3:, ::3], WIDE.permute(2, 0, 1)[1:, ::2], WIDE[3, :, 4], WIDE[:1, :1, :1].expand(4, 5, 6),
        WIDE[:0, ::2], WIDE[2:, 5:, 7].to(torch.bfloat16)[:, ::2], torch.tensor(3.0).expand(7),
    ],
    ids=["steps", "turned", "a column", "expanded", "empty", "bf16", "a number, expanded"],
)  # fmt: skip
@pytest.mark.parametrize("piece", [1 << 24, 256])
def test_what_has_gaps_is_copied_without_them(
    source: torch.Tensor, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_buffer, "_PIECE", piece)
    into = torch.full(source.shape, -1.0, dtype=source.dtype)
    assert copy_strided(into, source)
    assert torch.equal(into, source)


def test_bytes_are_copied_where_process_vm_readv_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = torch.arange(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    monkeypatch.setattr(host_buffer, "_read", None)
    assert copy_bytes(to.data_ptr(), source.data_ptr(), 5000)
    assert torch.equal(to, source)
