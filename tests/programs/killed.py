"""Trains three ranks that roll back; at each start one of them is killed during the rollback, at another point.

    torchrun --max-restarts N --nproc-per-node 3 killed.py FOLDER POINT:RANK...     a start for each, then a healthy one

Surviving ranks ignore torchrun's SIGTERM: they end by themselves, or the job hangs. Ranks leave FOLDER/START.RANK.json:
their answers about the rollback, a number for their weights after each step, and how the start ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sentinel
from sentinel import wire
from sentinel.hooks.rollback.agreement import RankConsensus, TwoPhaseCommit
from sentinel.hooks.rollback.restorer import Restorer

RULES = """
group: killed
signals: {command: the run asks for a rollback}
rules:
  - {alert: Command, expr: command > 0, severity: info, actions: [rollback], annotations: {summary: asked}}
  - {override: SlowStep, disable: true}
  - {override: MemoryCreep, disable: true}
"""
ASKED_AT, STEPS, MOST_STEPS = 40, 80, 4000
"""Step of the rollback; least steps of a start; most steps, if a busy daemon answers the rollback late."""
VERDICT_SECONDS = 2.0
"""Seconds that ranks wait at points where they wait in vain; at others a busy machine may need LONG_SECONDS."""
LONG_SECONDS = 60.0
GROUP_SECONDS = 600.0
"""Time-out in seconds of the loop's own process group: a rank that waited that long would be found to hang."""


def killed_before(owner: Any, name: str) -> None:
    """Kill this process at the next call of a function, before the function runs."""
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def killed_after(owner: Any, name: str) -> None:
    """Kill this process at the next call of a function, after the function has run."""
    function = getattr(owner, name)

    def last(*arguments: Any, **more: Any) -> None:
        function(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, last)


POINTS: dict[str, Callable[[], None]] = {
    "prepare": lambda: killed_before(Restorer, "_prepare_answer"),
    "waiting": lambda: killed_before(TwoPhaseCommit, "wait"),
    "ready": lambda: killed_before(RankConsensus, "_write"),
    "said": lambda: killed_after(RankConsensus, "_write"),
    "decided": lambda: killed_after(RankConsensus, "ask_ranks"),
}
"""Points at which a rank is killed.

On receipt of the order; at its step, before the verdict; before and after it writes that it is ready; and once all have
agreed, before it restores.
"""
IN_VAIN = ("waiting", "ready")
AFTER_GO = "go"
"""The point at which rank 0, the host of the process group's store, ends after rank 1 knows that all restore, but
before rank 2 has looked."""


def end_host_after_go(rank: int, folder: Path) -> None:
    """Make the three ranks act in the order of `AFTER_GO`."""
    ask, write = RankConsensus.ask_ranks, RankConsensus._write
    host, knows = folder / "host", folder / "knows"

    def ask_and_tell(*arguments: Any) -> str:
        word = ask(*arguments)
        if rank == 0:
            wait_for(knows.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            knows.write_text(word)
        return word

    def write_and_wait(consensus: RankConsensus, promise: wire.Prepare, name: str, text: str) -> str:
        fault = write(consensus, promise, name, text)
        if name == "rank-2":
            wait_for(lambda: has_ended(int(host.read_text())))
        return fault

    if rank == 0:
        host.write_text(str(os.getpid()))
    RankConsensus.ask_ranks = ask_and_tell  # type: ignore[method-assign]
    RankConsensus._write = write_and_wait  # type: ignore[method-assign]


def wait_for(found: Callable[[], bool]) -> None:
    """Wait for a condition, for less time than any rank waits in the agreement."""
    until = time.monotonic() + LONG_SECONDS / 2
    while not found() and time.monotonic() < until:
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    """Return whether a process's sockets are closed: it is gone, or a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def noting(told: list[dict[str, Any]], verdict_seconds: float) -> None:
    """Make restorers add their answers to a commit to `told`."""
    create = Restorer.__init__

    def make_noting(restorer: Restorer, *arguments: Any, session: Any, **more: Any) -> None:
        send = session.send

        def noted(message: wire.FromRank) -> None:
            send(message)
            if isinstance(message, wire.RolledBack):
                told.append({"ok": message.ok, "to": message.to, "at": message.at, "reason": message.reason})

        session.send = noted
        create(restorer, *arguments, session=session, **(more | {"verdict_seconds": verdict_seconds}))

    Restorer.__init__ = make_noting  # type: ignore[method-assign, assignment]


def train(told: list[dict[str, Any]], weights: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    terms = sentinel.Rollback(every=10, keep=3, margin=5)
    monitor = sentinel.attach(model, optimizer, run="killed", rollback=terms)
    while monitor.state != "streaming":
        time.sleep(0.01)
    dist.barrier()
    for step in range(MOST_STEPS):
        if step >= STEPS and told:  # so that all ranks leave after the same step
            break
        monitor.log(command=float(step == ASKED_AT))
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        weights.append(sum(int(p.detach().view(torch.int32).sum()) for p in model.parameters()))
        time.sleep(0.02)  # so that the order comes before the last step
    dist.barrier()
    monitor.detach()


def main(folder: Path, points: list[str]) -> None:
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    told: list[dict[str, Any]] = []
    weights: list[int] = []
    point, _, victim = points[start].partition(":") if start < len(points) else ("", "", "")
    noting(told, VERDICT_SECONDS if point in IN_VAIN else LONG_SECONDS)
    if point == AFTER_GO:
        end_host_after_go(rank, folder)
    elif point and rank == int(victim):
        POINTS[point]()
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    end = ""
    try:
        train(told, weights)
    except RuntimeError as error:  # from the loop's own collective: a rank is gone
        end = str(error)
    found = {"told": told, "weights": weights, "end": end}
    (folder / f"{start}.{rank}.json").write_text(json.dumps(found))
    os._exit(bool(end))  # pytorch#190489: otherwise gloo's threads may abort the process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
