"""A small training, alone or as ranks of torchrun, that a rule stops: it logs `bad` from step 40 on.

stopping.py FOLDER HOOK [stop_on] [rollback]

HOOK is what the function of `monitor.on_stop` does: `save`, with a collective; `raise` on the last rank; `die` on the
last rank, by SIGKILL; `hang`, for which it has LAST_SECONDS; `none`: there is no function. With `stop_on` the alert is
`Told`, whose rule does not stop by itself. Each rank leaves FOLDER/ATTEMPT.RANK.json: the number of its steps, the step
that the function got, the sum of all ranks' numbers, and the exit status that the loop saw. At torchrun's second start
nothing is bad.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sentinel

RULES = """
group: stopping
signals: {bad: what the run says of itself, told: the same}
rules:
  - {alert: Bad, expr: bad > 0, actions: [rollback, stop], annotations: {summary: "bad at step {step}"}}
  - {alert: Told, expr: told > 0, annotations: {summary: "told at step {step}"}}
"""
BAD_AT, STEPS = 40, 4000
OFFSET = 100
"""The user's number for the first step."""
LAST_SECONDS = 1.0


def main(folder: Path, hook: str, words: list[str]) -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), "RANK" in os.environ
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
    is_last = False
    if ranks:
        dist.init_process_group("gloo")
        is_last = rank == dist.get_world_size() - 1
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    monitor = sentinel.attach(
        net,
        optimizer,
        step=OFFSET,
        stop_on=["Told", "Tolt"] if "stop_on" in words else (),
        rollback=sentinel.Rollback(every=10, keep=2, margin=5) if "rollback" in words else None,
    )
    found: dict[str, Any] = {"steps": 0, "step": None, "sum": None, "status": None}

    def last(step: int) -> None:
        found["step"] = step
        if hook == "hang":
            time.sleep(3600)
        if hook == "raise" and is_last:
            raise ZeroDivisionError("of the user's")
        if hook == "die" and is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        if hook == "save" and ranks:
            total = torch.tensor([rank + 1])
            dist.all_reduce(total)
            found["sum"] = int(total)
            time.sleep(rank)  # torchrun ends the other ranks once one has exited

    if hook != "none":
        monitor.on_stop(last, seconds=LAST_SECONDS if hook == "hang" else 600.0)
    name = "told" if "stop_on" in words else "bad"
    while monitor.state != "streaming":
        time.sleep(0.01)
    if ranks:
        dist.barrier()
    try:
        for step in range(200 if attempt else STEPS):
            monitor.log(**{name: float(step >= BAD_AT and not attempt)})
            optimizer.zero_grad()
            net(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            found["steps"] = step + 1
            time.sleep(0.01)
    except SystemExit as end:
        found["steps"] += 1  # it exited within the step
        found["status"] = end.code
        raise
    finally:
        (folder / f"{attempt}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
