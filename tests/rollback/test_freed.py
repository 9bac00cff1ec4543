"""Memory that the loop frees while it is copied beside it. Where that were read on, the process would be gone: each
has one of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sentinel.hooks import snapshot_transfer
from sentinel.hooks.snapshot_transfer import copied

BEGUN = """
import torch
from torch import nn
from sentinel.errors import RollbackError
from sentinel.hooks.snapshot import Ring
from sentinel.hooks.snapshot_weights import Weights

said = set()
for _ in range(4):
    net = nn.Linear(4096, 4096)  # 64 MB: the copy has begun when the next line runs, and is not over
    ring = Ring([Weights([net], [])], keep=2, margin=1, afford=lambda nbytes: None)
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


def begun(line: str) -> set[str]:
    """What became of snapshots, during which the loop did this."""
    code = BEGUN.replace("{line}", line)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd="/")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


@pytest.mark.processes
@pytest.mark.parametrize("line", ["net.weight.untyped_storage().resize_(0)", "net.share_memory()"])
def test_weights_whose_memory_is_freed_between_two_steps_end_no_run(line: str) -> None:
    """The second as by the first of a queue of torch.multiprocessing that they are put into."""
    gone = "a snapshot could not be copied: the memory of weight was taken away between two steps"
    assert begun(line) <= {gone, "torn"}


def test_all_is_copied_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_transfer, "_LONGEST", 1000)
    source, to = torch.arange(5000, dtype=torch.uint8), torch.zeros(5002, dtype=torch.uint8)
    assert copied(to[1:].data_ptr(), source.data_ptr(), 5000)
    assert torch.equal(to[1:-1], source)
    assert (to[0], to[-1]) == (0, 0)


def test_where_the_call_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    source, to = torch.arange(5000, dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    monkeypatch.setattr(snapshot_transfer, "_read", None)
    assert copied(to.data_ptr(), source.data_ptr(), 5000)
    assert torch.equal(to, source)
