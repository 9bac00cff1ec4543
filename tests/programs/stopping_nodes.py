"""Ranks on several nodes that a rule stops once FOLDER/break is there.

    torchrun --nnodes N stopping_nodes.py SIGNAL FOLDER

Only the last rank logs SIGNAL, so only its node has an alert. `bad` has a rule that stops the run; the script names the
alert of `told` in `stop_on`. The function of `monitor.on_stop` makes a collective over all ranks once FOLDER/hold is
gone; with `bad` it then hangs, and has a second for it. Each rank leaves FOLDER/RANK.json: the number of its steps, the
step that the function got, the sum of all ranks' numbers, and the exit status that the loop saw.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sentinel
from tests.programs.rolling import Training, everywhere
from tests.programs.stopping import LAST_SECONDS

LIMIT = 20_000
"""Most steps: about two minutes."""


def main() -> None:
    signal, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    training, found = Training("ddp"), dict[str, Any](steps=0, step=None, sum=None, status=None)
    last = training.rank == dist.get_world_size() - 1
    monitor = sentinel.attach(training.net, training.optimizer, run="stopping", stop_on=["Told"])

    def save(step: int) -> None:
        found["step"] = step
        (folder / f"leaving.{training.rank}").touch()
        while (folder / "hold").exists():
            time.sleep(0.01)
        total = torch.tensor([training.rank + 1])
        dist.all_reduce(total)
        found["sum"] = int(total)
        if signal == "bad":
            time.sleep(3600)

    monitor.on_stop(save, seconds=LAST_SECONDS if signal == "bad" else 600.0)
    broken = False
    try:
        for step in range(LIMIT):
            broken = broken or everywhere((folder / "break").exists())
            if last:
                monitor.log(**{signal: float(broken)})
            found["steps"] = step + 1
            training.step(step)
            if everywhere((folder / "stop").exists()):  # at the same step on all ranks: otherwise the others would wait
                break
            time.sleep(0.005)
    except SystemExit as end:
        found["status"] = end.code
        raise
    finally:
        (folder / f"{training.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
