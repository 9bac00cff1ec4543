"""Kills daemons, the coordinator or ranks during an incident, a rollback and a restart of a job over two nodes.

Each trial is one job of torchrun, 2 nodes x 2 ranks, with three kills at random moments: while an incident opens, while
all ranks are rolled back, while all nodes are started again. A trial fails if the weights of two ranks differ after any
step; if a rank trains on without a rollback that another made; if an alert did not reach the receiver, or came as two
pages (except for a node's own, while it was cut off); if the job does not end, or its nodes end differently.
"""

from __future__ import annotations

import collections
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.proofs._nodes_job import NODES, RANKS, RUN_ID, Job, read_log

TRIALS = 40
"""Trials for about a hundred kills: a trial has two if nothing is left to restart."""
SAMPLE = (0,)
VICTIMS = ("node daemon", "coordinator", "rank")
LIMIT_SECONDS = 420.0
"""Limit of each wait: torch alone may take minutes to start on a busy machine."""
INCIDENT, ROLLBACK, RESTART = 2.0, 1.5, 12.0
"""Seconds from the beginning of each within which the kill comes."""
APART_STEPS = 150
"""Steps between two deaths of ranks: a fault repeated at the same step or within 2 s stops the job with status 86."""
ENDED = (0, 85)
"""Right exit statuses: 0: complete; 85: ended in order, because a daemon died while the job was between two starts."""


def run_trial(seed: int) -> dict[str, Any]:
    """Run one job with three kills, and check it."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="n") as folder:
        trial = _Trial(Path(folder), chance)
        try:
            trial.run(seed)
            return trial.check()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{trial.tell()}") from None
        finally:
            trial.job.close()


class _Trial:
    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root, self.chance, self.job = root, chance, Job(root)
        self.kills: list[str] = []
        self.counted: collections.Counter[str] = collections.Counter()

    def run(self, seed: int) -> None:
        """Make the three kills, and end the job."""
        self._await(self._meets, "the nodes to meet")
        self._open_incident(VICTIMS[seed % 2])
        self._await(self._meets, "the nodes to meet after the incident")
        self._roll_back(VICTIMS[seed // 2 % 3])
        if not self.job.over:
            self._await(self._meets, "the nodes to meet after the rollback")
            behind = max(entry["step"] for rank in range(RANKS) for entry in read_log(self.root, rank)) + APART_STEPS
            self._await(lambda: read_log(self.root, 0)[-1]["step"] > behind, "steps between two deaths")
            self._restart(VICTIMS[(seed + seed // 6) % 3])
        (self.root / "stop").touch()
        self._await(lambda: self.job.over, "the end of the job")

    def check(self) -> dict[str, Any]:
        """Return what was counted. Raises AssertionError if a promise was broken."""
        statuses = [node.returncode for node in self.job.nodes]
        assert statuses[0] in ENDED, f"exit statuses {statuses}"
        assert statuses == [statuses[0]] * NODES, f"exit statuses {statuses}"
        self._check_ranks()
        self._check_pages()
        return {
            "case": ", ".join(self.kills), "complete": int(statuses == [0, 0]), "ended": int(statuses[0] == 85),
            **self.counted,
        }  # fmt: skip

    def tell(self) -> str:
        """Describe what is known, for a failure's message."""
        self.job.inbox.take()
        pages = [
            f"{m.alert} {m.incident} {m.run_id} {'fires' if m.firing else 'over'}" for m in self.job.inbox.messages
        ]
        said = [f"--- node {node}\n{self.job.said(node)[-4000:]}" for node in range(NODES)]
        return "\n".join([f"kills: {self.kills}, counted {dict(self.counted)}", f"messages: {pages}", *said])

    def _open_incident(self, victim: str) -> None:
        (self.root / "high").touch()
        self._kill("incident", victim, INCIDENT)
        self._await(lambda: self._has("High", fires=True), "the page of High")
        (self.root / "high").unlink()
        self._await(lambda: self._has("High", fires=False), "the end of High")

    def _roll_back(self, victim: str) -> None:
        attempt = self._attempt()
        (self.root / "break").touch()
        self._kill("rollback", victim, ROLLBACK)

        def has_answer() -> bool:
            last = [entries[-1] for rank in range(RANKS) if (entries := read_log(self.root, rank))]
            back = all(entry["rolled"] for entry in last) or all(entry["attempt"] > attempt for entry in last)
            return self.job.over or back

        self._await(has_answer, "all ranks to be rolled back, or started again")
        rolled = any(entry["rolled"] for entry in read_log(self.root, 0) if entry["attempt"] == attempt)
        self.counted["rolled back" if rolled else "started again in its place"] += 1

    def _restart(self, victim: str) -> None:
        attempt = self._attempt()
        (self.root / f"die-{self.chance.randrange(RANKS)}").touch()
        self._kill("restart", victim, RESTART)
        self._await(lambda: self.job.over or self._attempt() > attempt, "all ranks to be started again")
        self.counted["restarted"] += int(not self.job.over)

    def _kill(self, when: str, victim: str, within: float) -> None:
        time.sleep(self.chance.uniform(0, within))
        rank = self.chance.randrange(RANKS)
        killed = {
            "node daemon": lambda: self.job.kill_daemon(1),
            "coordinator": lambda: self.job.kill_daemon(0),
            "rank": lambda: self.job.kill_rank(rank),
        }[victim]()
        self.kills.append(f"{when}: {victim if killed else 'none there'}")
        self.counted["kills"] += int(killed)

    def _attempt(self) -> int:
        """Return the attempt that all ranks have reached; -1: none."""
        return min((e[-1]["attempt"] if (e := read_log(self.root, rank)) else -1) for rank in range(RANKS))

    def _meets(self) -> bool:
        """Return whether all nodes have met, and steps are judged on each."""
        status = [self.job.ask(node) for node in range(NODES)]
        views = [one.get("job", {}).get("view") for one in status]
        return views == ["coordinator", "joined"] and all("level" in one.get("values", {}) for one in status)

    def _has(self, alert: str, *, fires: bool) -> bool:
        """Return whether the receiver got a message that an alert of the job fires, or that it is over."""
        self.job.inbox.take()
        return any((m.alert, m.firing, m.run_id) == (alert, fires, RUN_ID) for m in self.job.inbox.messages)

    def _check_ranks(self) -> None:
        """Check that all ranks have the same weights after each step, and that none missed a rollback."""
        weights: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        rolled: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
        for rank in range(RANKS):
            for entry in read_log(self.root, rank):
                place = entry["attempt"], entry["step"]
                weights[place].add(entry["weights"])
                rolled[place].add(str(entry["rolled"]))
        parted = [place for place, found in sorted(weights.items()) if len(found) > 1]
        assert not parted, f"the ranks have other weights at (attempt, step) {parted[:5]}"
        halves = [place for place, found in sorted(rolled.items()) if len(found) > 1]
        assert not halves, f"some ranks were rolled back and others not, at (attempt, step) {halves[:5]}"

    def _check_pages(self) -> None:
        self.job.inbox.take()
        told = [message for message in self.job.inbox.messages if message.firing]
        for alert in ("High", "Broken"):
            # An alert that was over before a coordinator heard of it is only sent as over.
            assert any(message.alert == alert for message in self.job.inbox.messages), f"{alert} was lost"
        deaths = 1 + sum(kill.endswith(": rank") for kill in self.kills)
        for alert, most in {"High": 1, "Broken": 1, "RankLost": deaths}.items():
            keys = {message.key for message in told if message.alert == alert and message.run_id == RUN_ID}
            assert len(keys) <= most, f"{alert} came under {len(keys)} keys: {sorted(keys)}"
        own = {message.key for message in told if message.run_id != RUN_ID}
        over = {message.key for message in self.job.inbox.messages if not message.firing}
        self.counted["pages of a node's own"] += len(own)
        self.counted["of these not resolved"] += len(own - over)

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)
