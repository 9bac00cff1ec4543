"""Runs a torchrun job over two nodes on loopback, with a daemon and `sentinel run` on each, and the logs of its ranks.

Files in its folder control the ranks: while `high` exists, the level is high; `break` makes the last rank broken until
it is rolled back or started again; `die-R` kills rank R; `stop` ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.proofs._nodes import NodesJob, kill
from sentinel.demo.network import find_loopback

NODES, RANKS_A_NODE = 2, 2
RANKS = NODES * RANKS_A_NODE
RUN_ID = "kills"
SAVE_EVERY = 20
STEP_SECONDS = 0.02
RESTARTS = 6
RULES = """
group: kills
signals: {level: what the ranks log, broken: the last rank broke}
rules:
  - alert: High
    expr: level > 5
    severity: critical
    annotations: {summary: "level {level:.0f}"}
  - alert: Broken
    expr: broken > 0
    severity: critical
    actions: [rollback]
    annotations: {summary: "broken"}
  - {override: Hang, expr: stalled_seconds > 20}
"""
SETTINGS = """
[daemon]
http = 0
[grouping]
wait = "0s"
interval = "0s"
[[receivers]]
name = "pager"
type = "webhook"
url = "http://%s/"
severities = ["critical"]
"""


class Job(NodesJob):
    """The job, started when created and ended with `close`."""

    def __init__(self, root: Path) -> None:
        network = find_loopback(NODES)
        (root / "saved").mkdir()
        (root / "rules.yaml").write_text(RULES)
        environment = {
            "SENTINEL_RULES": str(root / "rules.yaml"),
            "SENTINEL_CLUSTER": network.coordinator,
            "SENTINEL_CLUSTER_SECRET": "a secret of all nodes",
        }
        supervised = f"-m sentinel run --restarts {RESTARTS} --pause 0.1 --"
        super().__init__(
            root, network, ["-m", "bench.proofs._nodes_job", str(root)], run_id=RUN_ID, ranks_a_node=RANKS_A_NODE,
            settings=SETTINGS % network.inbox, environment=environment, launcher=[sys.executable, *supervised.split()],
        )  # fmt: skip

    def kill_rank(self, rank: int) -> bool:
        """Send SIGKILL to the present process of a rank; return whether it ran."""
        entries = read_log(self.root, rank)
        return kill(entries[-1]["pid"]) if entries else False


def read_log(root: Path, rank: int) -> list[dict[str, Any]]:
    """Return the entries that a rank wrote, one per step, without a line that a kill cut short."""
    path = root / f"log.{rank}"
    entries: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def train(root: Path) -> None:
    """Train one rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import sentinel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ.get("SENTINEL_ATTEMPT", "0"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    before = int(os.environ.get("SENTINEL_RESUME_BEFORE", 10**9))
    start = max((step for path in (root / "saved").glob("*.pt") if (step := int(path.stem)) <= before), default=0)
    if start:
        saved = torch.load(root / "saved" / f"{start}.pt")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    model = nn.parallel.DistributedDataParallel(net)
    terms = sentinel.Rollback(every=10, keep=3, margin=5, budget=3)
    monitor = sentinel.attach(model, optimizer, run="kills", step=start, rollback=terms)
    rolled: list[tuple[int, int]] = []
    monitor.on_rollback(lambda to, at: rolled.append((to, at)))
    torch.manual_seed(1000 * attempt + rank)
    step, broken_for = start, 0
    with (root / f"log.{rank}").open("a", buffering=1) as log:
        while True:
            high, breaks, stops = list(_read_flags(root, rank))
            broken_for = len(rolled) + 1 if breaks else broken_for
            wrecked = len(rolled) < broken_for
            monitor.log(level=9.0 if high else 1.0, **({"broken": float(wrecked)} if rank == RANKS - 1 else {}))
            if rank == 0 and step % SAVE_EVERY == 0 and step > start and not wrecked:
                draft = root / "draft"
                torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, draft)
                draft.replace(root / "saved" / f"{step}.pt")
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) * (1000 if wrecked else 1)).square().mean().backward()
            optimizer.step()
            weights = sum(int(p.detach().view(torch.int32).sum()) for p in net.parameters())
            entry = {"pid": os.getpid(), "attempt": attempt, "step": step, "weights": weights, "rolled": rolled}
            print(json.dumps(entry), file=log)
            if stops:
                break
            time.sleep(STEP_SECONDS)
            step += 1
    dist.barrier()
    monitor.detach()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    dist.destroy_process_group()


def _read_flags(root: Path, rank: int) -> Iterator[bool]:
    """Yield `high`, `break`, `stop` as rank 0 sees them now. If this rank must die, kill it."""
    import torch
    import torch.distributed as dist

    if _take_file(root / f"die-{rank}"):
        os.kill(os.getpid(), signal.SIGKILL)
    flags = torch.zeros(3)
    if rank == 0:
        seen = (root / "high").exists(), _take_file(root / "break"), (root / "stop").exists()
        flags = torch.tensor([float(flag) for flag in seen])
    dist.broadcast(flags, 0)
    yield from (bool(flag) for flag in flags)


def _take_file(path: Path) -> bool:
    """Remove a file; return whether it was there. A file that appears during the call is seen at the next step."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    train(Path(sys.argv[1]))
