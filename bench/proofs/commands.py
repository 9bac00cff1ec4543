"""Orders rollbacks of four ranks at random moments: each must be applied at the same step on every rank, or on none.

Jobs of real DDP on gloo with a real daemon, and a `Prepare` about every second. In all jobs messages are delayed at
random; ten jobs have 50 commands, and in the others the daemon is killed four times at a random point of the
protocol. A rank that diverged would also hang its job in the next all-reduce, or end with other weights: a trial fails
on either.

Ranks wait 2 s for a verdict here instead of 10, so that a killed daemon costs less of a trial's time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.places import kill_daemon, make_places
from bench.proofs._points import watch_restorers

DELAYED = 10
TRIALS = DELAYED + 13
SAMPLE = (0, DELAYED)
COMMANDS_A_RUN, KILLS_A_RUN, COMMANDS_A_KILL = 50, 4, 4
RANKS = 4
SHORT_RANKS, SHORT_COMMANDS, SHORT_KILLS = 2, 8, 2
"""Sizes of the trials that the tests run."""
JOB_SECONDS = 400
VERDICT_SECONDS = 2.0
STEP_SECONDS = 0.004
DELAYS = (0.0, 0.0, 0.0, 0.002, 0.01, 0.05)
"""Seconds, drawn at random, that a message to a rank is delayed; later messages to that rank wait with it."""
ARRIVALS = ("message", "prepare", "commit")
POINTS = ("prepare", "promised", "commit", "committed", "restored")
"""Points at which a rank kills the daemon: when a message arrives, and after it was handled."""
RULES = """
group: agreement
signals: {command: the run asks for a rollback}
rules:
  - alert: Command
    expr: command > 0
    severity: info
    actions: [rollback]
    annotations: {summary: "asked"}
"""


class Rank:
    """Disturbs one rank: delays its messages, kills the daemon, and notes the answers."""

    def __init__(self, number: int, seed: int, kills: list[tuple[int, int, str]]) -> None:
        self._chance = random.Random(1000 * seed + number)
        self._kills = {(command, point) for rank, command, point in kills if rank == number}
        self.prepared: list[int] = []
        self.results: list[dict[str, Any]] = []
        self.killed = 0

    def reach(self, point: str, message: Any) -> None:
        """Act on a point that the restorer passes."""
        if point in ARRIVALS:
            time.sleep(self._chance.choice(DELAYS))
        if point == "prepare":
            self.prepared.append(message.id)
        if (len(self.prepared), point) in self._kills:
            self._kills.discard((len(self.prepared), point))
            self.killed += kill_daemon(Path(os.environ["SENTINEL_RUNTIME"]))


def train(folder: Path, commands: int, seed: int, kills: list[tuple[int, int, str]]) -> None:
    """Train one rank of the run until `commands` commands were given, and write down what it noted."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import sentinel

    dist.init_process_group("gloo")
    number = dist.get_rank()
    rank = Rank(number, seed, kills)
    watch_restorers(rank.reach, rank.results, verdict_seconds=VERDICT_SECONDS)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    terms = sentinel.Rollback(every=10, keep=3, margin=5, budget=10**6)
    monitor = sentinel.attach(model, optimizer, run="agreement", rollback=terms)
    chance, step, over = random.Random(seed), 0, torch.zeros(1)
    next_at = time.monotonic() + 3
    while not over.item():
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(4 * step + number))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        asks = number == 0 and time.monotonic() > next_at
        if number == 0:
            monitor.log(command=float(asks))
        if asks:
            next_at = time.monotonic() + chance.uniform(0.2, 1.2)
        optimizer.step()
        if number == 0:
            over.fill_(len(rank.prepared) >= commands)
        dist.broadcast(over, 0)
        time.sleep(chance.uniform(0, 2 * STEP_SECONDS))
        step += 1
    weights = [parameter.detach().view(torch.int32).sum().item() for parameter in model.parameters()]
    dist.barrier()
    monitor.detach()
    found = {
        "steps": step, "prepared": rank.prepared, "results": rank.results, "killed": rank.killed, "weights": weights,
    }  # fmt: skip
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
    os._exit(0)


def run_trial(seed: int) -> dict[str, Any]:
    """Run one job, a shorter one in the tests; return what was counted."""
    short = "PYTEST_CURRENT_TEST" in os.environ
    ranks = SHORT_RANKS if short else RANKS
    kills = 0 if seed < DELAYED else SHORT_KILLS if short else KILLS_A_RUN
    commands = (kills + 1) * COMMANDS_A_KILL if kills else SHORT_COMMANDS if short else COMMANDS_A_RUN
    found = run_job(seed, ranks, commands, kills)
    return {"case": "the daemon killed" if kills else "delayed", **compare_ranks(found)}


def run_job(seed: int, ranks: int, commands: int, kills: int) -> list[dict[str, Any]]:
    """Run a job; return what each rank noted."""
    chance = random.Random(seed)
    plan = [
        (
            chance.randrange(ranks),
            1 + COMMANDS_A_KILL * number + chance.randrange(COMMANDS_A_KILL),
            chance.choice(POINTS),
        )
        for number in range(kills)
    ]
    with tempfile.TemporaryDirectory(prefix="a") as name:
        folder = Path(name)
        (folder / "rules.yaml").write_text(RULES)
        environment = {**os.environ, **make_places(folder), "SENTINEL_RULES": name + "/rules.yaml"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        options = ["--folder", name, "--commands", str(commands), "--seed", str(seed), "--plan", json.dumps(plan)]
        with (folder / "said").open("w+") as said:
            command = [*launch, "-m", "bench.proofs.commands", *options]
            job = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
            try:
                status: int | str = job.wait(JOB_SECONDS)
            except subprocess.TimeoutExpired:
                job.terminate()
                job.wait(60)
                status = "it hangs"
            said.seek(0)
            assert status == 0, f"{status}: {said.read()[-3000:]}"
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def compare_ranks(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Count the commands, those applied and the kills. Raises AssertionError if the ranks differ."""
    answers: dict[int, dict[int, dict[str, Any]]] = collections.defaultdict(dict)
    for number, rank in enumerate(ranks):
        for result in rank["results"]:
            answers[result["id"]][number] = result
    commands = {command for rank in ranks for command in rank["prepared"]}
    applied = 0
    for command in commands:
        done = [result for result in answers[command].values() if result["ok"]]
        applied += bool(done)
        same = len(done) == len(ranks) and len({(result["to"], result["at"]) for result in done}) == 1
        assert same or not done, f"command {command} parted the ranks: {answers[command]}"
    assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks), "the ranks end with different weights"
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks), "the ranks took different numbers of steps"
    return {"commands": len(commands), "applied": applied, "kills": sum(rank["killed"] for rank in ranks)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--commands", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--plan", type=json.loads)
    given = parser.parse_args()
    train(given.folder, given.commands, given.seed, given.plan)
