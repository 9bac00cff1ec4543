"""Ranks on several nodes that break once FOLDER/break is there, and are compared with a training that never broke.

    torchrun --nnodes N rolling_nodes.py WAY FOLDER

Only the last rank logs that it broke; so only its node has an alert. Each rank leaves FOLDER/RANK.json: to which steps
it was rolled back, at which steps, and whether its state is that of a training without the undone steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import sentinel
from tests.programs.rolling import AFTER, EVERY, Training, everywhere

LIMIT = 20_000
"""Most steps: about two minutes."""


def main() -> None:
    way, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    training = Training(way)
    last = training.rank == dist.get_world_size() - 1
    # Snapshots reach back further than a beat of the coordinator, by which a node learns what all nodes hold.
    terms = sentinel.Rollback(every=EVERY, keep=16, margin=5, budget=2)
    monitor = sentinel.attach(training.net, training.optimizer, run=way, rollback=terms)
    rolled: list[tuple[int, int]] = []
    monitor.on_rollback(lambda to, at: rolled.append((to, at)))
    broken, step = LIMIT, 0
    while step < LIMIT and not (rolled and step >= rolled[0][1] + AFTER):
        if broken == LIMIT and everywhere((folder / "break").exists()):
            broken = step
        wrecked = step >= broken and not rolled
        if last:
            monitor.log(broken=float(wrecked))
        training.step(step, wrecked)
        if everywhere((folder / "stop").exists()):  # at the same step on all ranks: otherwise the others would wait
            break
        time.sleep(0.005)
        step += 1
    reference = Training(way)
    undone = [range(to + 1, at + 1) for to, at in rolled]
    for other in range(step):
        if not any(other in steps for steps in undone):
            reference.step(other)
    same = all(torch.equal(one, other) for one, other in zip(training.state(), reference.state(), strict=True))
    (folder / f"{training.rank}.json").write_text(json.dumps({"rolled": rolled, "same": same, "broken": broken}))
    dist.barrier()
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
