"""Trains one rank of a DDP job that is healthy until one rank has a fault: see `bench/proofs/nodes_faults.py`.

    torchrun ... -m bench.proofs._nodes_faults_job KIND FOLDER/FILE SECONDS RANK

Faults and arguments are those of `tests/programs/waiting_ranks.py`, and RANK has the fault. Training begins once the
folder has the file `met`; when the fault begins, its rank writes the file `fault`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from tests.programs import waiting_ranks
from tests.waiting import until

STEP_SECONDS = 0.12
STEPS, DRIFT_STEPS = 240, 6000
"""Steps of a loop, and of one whose replicas drift apart: their checksums are minutes apart, and it is killed."""
SHORTER = 40
"""Batches by which the faulty rank's loader is shorter, where that is the fault."""
FAULT_STEP = 60
MEET_SECONDS = 400.0


def train(kind: str, folder: Path, faulty: int) -> None:
    """Train one rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    has_fault = dist.get_rank() == faulty
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = sentinel.attach(model, optimizer, run="faults")
    until((folder / "met").exists, "the daemons of all nodes", MEET_SECONDS)
    dist.barrier()
    batches = DRIFT_STEPS if kind == "drift" else STEPS - SHORTER * (kind == "uneven" and has_fault)
    data = torch.randn(8 * batches, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    longest, begun = 0.0, time.monotonic()
    for step, (x,) in enumerate(DataLoader(TensorDataset(data), batch_size=8)):
        waiting_ranks.train(model, optimizer, x)
        time.sleep(STEP_SECONDS)
        longest, begun = max(longest, time.monotonic() - begun), time.monotonic()
        if step == FAULT_STEP and has_fault and kind not in ("uneven", "afterwards"):
            note_fault(folder, step, longest)
            do_otherwise(kind, monitor, model)
    if has_fault and kind in ("uneven", "afterwards"):
        note_fault(folder, step, longest)
        if kind == "uneven":
            waiting_ranks.wait_for_the_file()
        else:
            time.sleep(waiting_ranks.SECONDS)
    dist.barrier()
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


def do_otherwise(kind: str, monitor: sentinel.Monitor, model: nn.Module) -> None:
    """Commit the fault."""
    if kind == "drift":
        with torch.no_grad():
            model.get_parameter("module.2.weight")[0, 3] += 0.5
    elif kind == "declared":
        waiting_ranks.declared(monitor)
    elif kind != "healthy":
        (waiting_ranks.HANGS | {task.__name__: task for task in waiting_ranks.LONG})[kind]()


def note_fault(folder: Path, step: int, longest: float) -> None:
    """Write the Unix time at which the fault begins, the step before it, and the longest step so far, in seconds."""
    (folder / "draft").write_text(f"{time.time()} {step} {longest}")
    (folder / "draft").replace(folder / "fault")


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]).parent, int(sys.argv[4]))
