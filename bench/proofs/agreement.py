"""Kills a process at each point of an agreement to roll back: all surviving ranks must restore, or none.

    victim    each of four ranks, the host of the process group's store, the daemon
    point     where in the agreement: when a message arrives, after it was handled, at the step, before and after each
              word of the ranks is written, before the restore, after it

Real processes, real gloo, a real daemon; the ranks are forks of one process that has loaded torch. A trial fails if
two survivors differ in whether they restored, or in their weights after any step; if a call of `optimizer.step()`
takes more than a minute; or if a survivor does not end.

Ranks wait 2 s for a verdict and for each other, and in one trial of five the default 10 s.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.places import kill_daemon, make_places
from bench.proofs._forks import end, fork, join_store, leave, silence
from bench.proofs._points import watch_restorers
from bench.proofs.commands import RULES, STEP_SECONDS

RANKS = 4
VICTIMS = ("rank 0", "rank 1", "rank 2", "rank 3", "store", "daemon")
POINTS = (
    "prepare", "promised", "commit", "committed", "waiting", "ready", "said", "deciding", "decided", "restored",
)  # fmt: skip
TRIALS = 300


def find_seed(victim: str, point: str) -> int:
    """Return the first seed whose trial kills this victim at this point."""
    return POINTS.index(point) * len(VICTIMS) + VICTIMS.index(victim)


SAMPLE = (find_seed("store", "decided"), find_seed("rank 1", "said"), find_seed("daemon", "commit"))
ASKED_AT, STEPS = 40, 70
ANSWER_SECONDS = 15.0
"""Seconds within which a rollback is answered, if need be by the daemon that replaces a killed one."""
MOST_SECONDS = 60.0
"""Seconds that a step may take."""
JOB_SECONDS = 150.0


def run_trial(seed: int) -> dict[str, Any]:
    """Make one kill in a job of four ranks; return what the survivors did.

    Only the quickest rank reaches some points: if the victim did not, the job is run again, up to five times in all.
    """
    _load_torch()
    for _ in range(5):
        counted = _run_job(seed)
        if counted["kills"]:
            break
    return counted


def _run_job(seed: int) -> dict[str, Any]:
    victim, point = VICTIMS[seed % len(VICTIMS)], POINTS[seed // len(VICTIMS) % len(POINTS)]
    patience = 10.0 if (seed // len(VICTIMS)) % 5 == 4 else 2.0
    killer = int(victim[-1]) if victim.startswith("rank") else None
    with tempfile.TemporaryDirectory(prefix="g") as name:
        folder = Path(name)
        (folder / "rules.yaml").write_text(RULES)
        host = fork(lambda: _host_store(folder)) if victim == "store" else 0
        places = make_places(folder) | {
            "SENTINEL_RUN_ID": "agreement", "SENTINEL_RULES": name + "/rules.yaml",
            "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
        }  # fmt: skip
        ranks = [
            fork(lambda rank=rank: _train(folder, rank, places, patience, (killer, point, victim, host)))  # type: ignore[misc]
            for rank in range(RANKS)
        ]
        try:
            ended = _await(ranks)
        finally:
            for process in filter(None, [*ranks, host]):
                end(process)
            deadline = time.monotonic() + 5
            while kill_daemon(folder / "run") and time.monotonic() < deadline:
                time.sleep(0.05)
        killed = {int(victim[-1])} if victim.startswith("rank") else set()
        return _compare(folder, killed, ended, victim, point)


def _load_torch() -> None:
    """Load torch and Sentinel's hooks before the forks: it is most of a trial's time."""
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.optim

    import sentinel.hooks.rollback.restorer
    import sentinel.hooks.session.attach

    torch.set_num_threads(1)
    sentinel.attach  # noqa: B018 (loaded at its first use)


def _compare(folder: Path, killed: set[int], ended: bool, victim: str, point: str) -> dict[str, Any]:
    left: dict[int, dict[str, Any]] = {}
    for rank in set(range(RANKS)) - killed:
        file = folder / f"{rank}.json"
        assert file.exists(), (
            f"{victim}, {point}: rank {rank} did not come to its end ({'in time' if ended else 'hung'})"
        )
        left[rank] = json.loads(file.read_text())
    assert all("fault" not in one for one in left.values()), next(
        one["fault"] for one in left.values() if "fault" in one
    )
    met = (folder / "met").exists()
    longest = max(one["longest"] for one in left.values())
    assert longest < MOST_SECONDS, f"{victim}, {point}: a step took {longest:.1f} s"
    steps = min(len(one["weights"]) for one in left.values())
    first = next(iter(left.values()))
    for rank, one in left.items():
        assert one["weights"][:steps] == first["weights"][:steps], f"{victim}, {point}: rank {rank} has other weights"
        mine, its = ([(r["id"], r["to"], r["at"]) for r in each["results"] if r["ok"]] for each in (one, first))
        assert mine == its, f"{victim}, {point}: the ranks parted: {one['results']}, {first['results']}"
    restored = any(result["ok"] for result in first["results"])
    return {
        "case": victim if met else f"{victim}, not met", "kills": int(met), "restored": int(restored and met),
        "none": int(met and not restored), "waited_ms": 1000 * longest,
    }  # fmt: skip


Plan = tuple[int | None, str, str, int]
"""(the rank that kills; None: the first to reach the point; the point; the victim; the pid of the store's host)."""


class _Killing:
    """Kills the victim when this rank reaches the point; if any rank may kill, the first to reach it does."""

    def __init__(self, folder: Path, rank: int, plan: Plan) -> None:
        self._folder = folder
        killer, self._point, self._victim, self._host = plan
        self._mine = killer in (None, rank)

    def reach(self, point: str, _: Any) -> None:
        if not self._mine or point != self._point:
            return
        self._mine = False
        try:
            (self._folder / "met").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._victim == "daemon":
            kill_daemon(self._folder / "run")
        else:
            os.kill(self._host if self._victim == "store" else os.getpid(), signal.SIGKILL)


def _train(folder: Path, rank: int, places: dict[str, str], patience: float, plan: Plan) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    import sentinel

    os.environ.update(places | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    silence()
    results: list[dict[str, Any]] = []
    watch_restorers(_Killing(folder, rank, plan).reach, results, verdict_seconds=patience)
    store = join_store(folder, host=rank == 0 and plan[2] != "store")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    terms = sentinel.Rollback(every=10, keep=3, margin=5)
    monitor = sentinel.attach(model, optimizer, run="agreement", rollback=terms)
    deadline = time.monotonic() + 60
    while monitor.state != "streaming" and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    weights: list[int] = []
    longest, step, over, until = 0.0, 0, torch.zeros(1), 0.0
    try:
        while not over.item():
            monitor.log(command=float(step == ASKED_AT and rank == 0))
            if step == ASKED_AT:
                until = time.monotonic() + ANSWER_SECONDS
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            begun = time.monotonic()
            optimizer.step()
            longest = max(longest, time.monotonic() - begun)
            weights.append(sum(int(p.detach().view(torch.int32).sum()) for p in model.parameters()))
            over.fill_(rank == 0 and step >= STEPS and bool(results or time.monotonic() > until))
            dist.broadcast(over, 0)
            time.sleep(STEP_SECONDS)
            step += 1
    except RuntimeError:  # from the loop's own collective: a rank is gone
        pass
    found = {"results": results, "weights": weights, "longest": longest}
    leave(folder / f"{rank}.json", json.dumps(found))
    os._exit(0)


def _host_store(folder: Path) -> None:
    _store = join_store(folder, host=True)
    signal.pause()


def _await(processes: list[int]) -> bool:
    """Wait for the processes; return whether all ended in time."""
    deadline, left = time.monotonic() + JOB_SECONDS, set(processes)
    while left and time.monotonic() < deadline:
        for process in list(left):
            if os.waitpid(process, os.WNOHANG)[0]:
                left.discard(process)
        time.sleep(0.02)
    return not left
