"""Ranks on several nodes whose snapshots go to disk; the last rank dies once, and all resume from disk.

    sentinel run -- torchrun --nnodes N saving_nodes.py WAY FOLDER PLACE...

Node K writes to the K-th PLACE. The last rank is killed as soon as a snapshot of step LATE or later is on all nodes.
Each rank leaves FOLDER/RANK.json: the step from which it began at each start, and whether its state at the end is that
of an undisturbed training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import sentinel
from sentinel.hooks.core import faults
from sentinel.hooks.snapshot import directory, node_parts
from tests.programs.rolling import Training

EVERY, LATE, AFTER = 10, 20, 30
LIMIT = 5_000


def list_written(places: set[Path], node_count: int) -> set[int]:
    """Return the steps of the snapshots of which every node has published its part."""
    own = [path for place in places for _, path in node_parts.list_places(place)]
    return set.intersection(*(set(directory.steps(path)) for path in own)) if len(own) == node_count else set()


def main() -> None:
    way, folder, places = sys.argv[1], Path(sys.argv[2]), [Path(word) for word in sys.argv[3:]]
    faults.RETRY_SECONDS = 1.0
    dist.init_process_group("gloo")
    rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    place = places[rank // local]
    training = Training(way)
    if os.environ.get("SENTINEL_ATTEMPT", "0") != "0":
        for other in range(3):  # so that the state is another; and DDP sums in another order at its first step
            training.step(other)
    start = sentinel.resume(training.net, training.optimizer, directory=place)
    log, died = folder / f"starts.{rank}", folder / "died"
    with log.open("a") as starts:
        print(start, file=starts)
    terms = sentinel.Rollback(every=EVERY, keep=4, margin=5, directory=place, disk_every=1)
    monitor = sentinel.attach(training.net, training.optimizer, run=way, rollback=terms, step=start)
    ends, step = LIMIT, start
    while step < ends:
        training.step(step)
        if rank == dist.get_world_size() - 1 and not died.exists():
            if max(list_written({*places}, len(places)), default=0) >= LATE:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif died.exists() and start and ends == LIMIT:
            ends = start + AFTER
        time.sleep(0.05)  # gives time to write a snapshot before it is overwritten
        step += 1
    reference = Training(way)
    for other in range(step):
        reference.step(other)
    same = all(torch.equal(one, other) for one, other in zip(training.state(), reference.state(), strict=True))
    begun = [int(line) for line in log.read_text().splitlines()]
    (folder / f"{rank}.json").write_text(json.dumps({"starts": begun, "same": same, "end": step}))
    dist.barrier()
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
