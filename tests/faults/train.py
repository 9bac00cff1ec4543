"""Trains faults and their healthy twins, one after the other, in one process with one daemon.

    python -m tests.faults.train precision --seed 0 --address unix:/tmp/watch/sentinel.sock [--only P1,P2]

Prints one JSON line per run. The family `jobs` runs as two ranks under torchrun, of which rank 0 prints.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import warnings
from collections.abc import Sequence

from tests.faults.fault import Fault, Trial

FAMILIES = ("memory", "precision", "stability", "throughput", "bugs", "hardware", "utilization", "jobs")
PAIRS = "pairs"
"""The family of pairs of faults, for bench/proofs/pairs.py."""


def faults(family: str) -> Sequence[Fault]:
    """Return the faults of a family."""
    found: Sequence[Fault] = importlib.import_module(f"tests.faults.{family}").FAULTS
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=(*FAMILIES, PAIRS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--every-step", action="store_true", help="sample everything at every step")
    parser.add_argument("--late", action="store_true", help="faults begin at a random step")
    parser.add_argument("--pace", type=int, default=0, help="milliseconds that a step takes at least")
    parser.add_argument("--device", default="cpu", help="models and batches are made there")
    asked = parser.parse_args()
    only = asked.only.split(",") if asked.only else []
    import torch

    from sentinel.hooks.core import governor

    torch.set_num_threads(1)
    if asked.device != "cpu":
        torch.set_default_device(asked.device)
    if asked.every_step:
        governor.FIRST, governor.DECISIONS = dict.fromkeys(governor.FIRST, 1) | {3: governor.RARE[0]}, (1 << 30,)
    warnings.simplefilter("ignore")  # torch warns of some faults, too
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    for fault in faults(asked.family):
        for faulty in (True, False) if not only or fault.id in only else ():
            began = time.monotonic()
            how = {"every_step": asked.every_step, "late": asked.late, "pace": asked.pace}
            trial = Trial(fault, faulty=faulty, seed=asked.seed, address=asked.address, **how)
            trial.train()
            told = {
                "id": fault.id, "faulty": faulty, "run": trial.run, "onset": trial.onset, "steps": trial.trained,
                "onset_time": trial.onset_time,
                "dropped": trial.dropped, "seconds": round(time.monotonic() - began, 2),
            }  # fmt: skip
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps(told), flush=True)
    if "RANK" in os.environ:
        time.sleep(0.5)  # gloo sometimes aborts if it is destroyed right after a barrier (pytorch#190489)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
