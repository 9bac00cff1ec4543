"""Command rollbacks at random moments, of four ranks, and look whether any of them ever parts from the others.

    python bench/agreement.py                            500 commands, their delivery delayed at random
    python bench/agreement.py --kills 50                 the daemon killed at a random point of the protocol, 50 times
    python bench/agreement.py --commands 20 --ranks 2    a short one

Real DDP jobs on gloo with a real daemon. A command is a `Prepare`; each must be applied at the same step on every rank,
or on none. A rank that parted would also hang its job in the next all-reduce, or end with other weights: both would be
seen. What is found is printed, and the exit status is then 1. `--results FILE` keeps what is done: started again, the
script goes on from there.

Ranks wait 2 s for a verdict here and not 10, so that a killed daemon costs less of the bench's time.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMANDS_A_RUN, KILLS_A_RUN, COMMANDS_A_KILL = 50, 4, 4
JOB_SECONDS = 400
VERDICT_SECONDS = 2.0
STEP_SECONDS = 0.004
DELAYS = (0.0, 0.0, 0.0, 0.002, 0.01, 0.05)
"""Seconds that a message to a rank is held back, by chance; what comes after it on that rank waits with it."""
POINTS = ("prepare", "promised", "commit", "committed", "restored")
"""Where a rank kills the daemon: as a message arrives, and once it was dealt with."""
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
    """What happens on one rank: messages are held back, the daemon is killed, answers are noted."""

    def __init__(self, number: int, seed: int, kills: list[tuple[int, int, str]]) -> None:
        self._chance = random.Random(1000 * seed + number)
        self._kills = {(command, point) for rank, command, point in kills if rank == number}
        self.prepared: list[int] = []
        self.results: list[dict[str, Any]] = []
        self.killed = 0

    def watch(self) -> None:
        """Put this between the daemon and every restorer of the process."""
        from sentinel import wire
        from sentinel.hooks.rollback.restorer import Restorer

        receive, created = Restorer.receive, Restorer.__init__

        def held_back(restorer: Restorer, message: wire.Message) -> None:
            time.sleep(self._chance.choice(DELAYS))
            kind = {wire.Prepare: ("prepare", "promised"), wire.Commit: ("commit", "committed")}.get(type(message))
            if isinstance(message, wire.Prepare):
                self.prepared.append(message.id)
            if kind:
                self._at(kind[0])
            receive(restorer, message)
            if kind:
                self._at(kind[1])

        def create(restorer: Restorer, *arguments: Any, send: Any, **more: Any) -> None:
            def noted(message: wire.FromRank) -> None:
                send(message)
                if isinstance(message, wire.RolledBack):
                    self._at("restored")
                    self.results.append(
                        {"id": message.id, "ok": message.ok, "to": message.to, "at": message.at, "why": message.reason}
                    )

            created(restorer, *arguments, send=noted, verdict_seconds=VERDICT_SECONDS, **more)

        Restorer.receive = held_back  # type: ignore[method-assign, assignment]
        Restorer.__init__ = create  # type: ignore[method-assign, assignment]

    def _at(self, point: str) -> None:
        if (len(self.prepared), point) in self._kills:
            self._kills.discard((len(self.prepared), point))
            self.killed += kill_daemon(Path(os.environ["SENTINEL_RUNTIME"]))


def kill_daemon(runtime: Path) -> int:
    """kill -9 for whatever serves there; how many that was."""
    for path in runtime.glob("*/sentinel.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
                os.kill(
                    struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0], signal.SIGKILL
                )
                return 1
            except OSError:
                pass
    return 0


def train(folder: Path, commands: int, seed: int, kills: list[tuple[int, int, str]]) -> None:
    """One rank of the run, until so many commands were given."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import sentinel

    dist.init_process_group("gloo")
    number = dist.get_rank()
    rank = Rank(number, seed, kills)
    rank.watch()
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
        "steps": step,
        "prepared": rank.prepared,
        "results": rank.results,
        "killed": rank.killed,
        "weights": weights,
    }
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.barrier()
    time.sleep(0.5)  # pytorch#190489: gloo's threads else may abort the process at its end
    os._exit(0)


def trial(seed: int, ranks: int, commands: int, kills: int) -> dict[str, Any]:
    """One job. What was commanded and applied, and what is wrong with it."""
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
        environment = {
            **os.environ, "SENTINEL_RUNTIME": name + "/run", "SENTINEL_STATE": name + "/state",
            "SENTINEL_RULES": name + "/rules.yaml", "XDG_CONFIG_HOME": name, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        options = ["--train", name, "--commands", str(commands), "--seed", str(seed), "--plan", json.dumps(plan)]
        with (folder / "said").open("w+") as said:
            job = subprocess.Popen([*launch, __file__, *options], env=environment, stdout=said, stderr=said)
            try:
                status: int | str = job.wait(JOB_SECONDS)
            except subprocess.TimeoutExpired:
                job.terminate()
                job.wait(60)
                status = "it hangs"
            said.seek(0)
            text = said.read()
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        if status != 0 or not all(file.exists() for file in files):
            return {"seed": seed, "commands": 0, "applied": 0, "kills": 0, "found": [f"{status}: {text[-3000:]}"]}
        return {"seed": seed, **compared([json.loads(file.read_text()) for file in files])}


def compared(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether each command was applied everywhere at one step, or nowhere."""
    found = []
    answers: dict[int, dict[int, dict[str, Any]]] = collections.defaultdict(dict)
    for number, rank in enumerate(ranks):
        for result in rank["results"]:
            answers[result["id"]][number] = result
    commands = {command for rank in ranks for command in rank["prepared"]}
    applied = 0
    for command in commands:
        done = [result for result in answers[command].values() if result["ok"]]
        applied += bool(done)
        if done and (len(done) < len(ranks) or len({(result["to"], result["at"]) for result in done}) > 1):
            found.append(f"command {command} parted the ranks: {answers[command]}")
    if len({json.dumps(rank["weights"]) for rank in ranks}) > 1:
        found.append("the ranks end with different weights")
    if len({rank["steps"] for rank in ranks}) > 1:
        found.append("the ranks took different numbers of steps")
    why = collections.Counter(
        result["why"] for rank in ranks[:1] for result in rank["results"] if not result["ok"]
    ).most_common(3)
    killed = sum(rank["killed"] for rank in ranks)
    return {"commands": len(commands), "applied": applied, "kills": killed, "not applied": why, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=500)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="a JSON line each run; a second start goes on after the last")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", default="[]", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.commands, options.seed, [tuple(kill) for kill in json.loads(options.plan)])
        return
    done: list[dict[str, Any]] = []
    if options.results and options.results.exists():
        done = [json.loads(line) for line in options.results.read_text().splitlines()]
    what, wanted = ("kills", options.kills) if options.kills else ("commands", options.commands)
    while (so_far := sum(one[what] for one in done)) < wanted and sum(bool(one["found"]) for one in done) < 5:
        kills = min(KILLS_A_RUN, wanted - so_far) if options.kills else 0
        commands = (kills + 1) * COMMANDS_A_KILL if kills else min(COMMANDS_A_RUN, wanted - so_far)
        done.append(trial(options.seed + len(done), options.ranks, commands, kills))
        print(json.dumps(done[-1]), flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    parted = sum(bool(one["found"]) for one in done)
    commands, applied, kills = (sum(one[key] for one in done) for key in ("commands", "applied", "kills"))
    jobs = f"{len(done)} jobs of {options.ranks} ranks"
    print(f"{commands} commands in {jobs}: {applied} applied; the daemon was killed {kills} times")
    print(f"jobs in which the ranks parted, hung or failed: {parted}")
    sys.exit(1 if parted else 0)


if __name__ == "__main__":
    main()
