"""Checks that each fault between ranks, D1 to D6, leads to one page naming rank and node, in a job over 4 x 2 ranks.

A job of torchrun has 4 nodes with 2 ranks each. Each node is a network namespace with a daemon of its own; gloo, stock
rules, and no settings but a receiver of critical alerts: the daemons find each other by the process group's store. One
rank, drawn by the seed, has a fault of `bench/proofs/ranks.py`, with stock limits. A trial fails if

    the receiver gets another alert than the fault's, or another cause, or its page does not name the rank and its node
    there is a second page, or a critical incident that belongs to another problem
    `sentinel incidents` (for a hang, `sentinel hang` too) says something else on a node without the fault (after a
    rank's death, which ends the job: on that rank's node)
    the alert, or its page, is late (ALLOWED_SECONDS, CHECKSUM_STEPS, TELL_SECONDS)
    anything is sent about what takes long with reason, or about a job without a fault; or such a job fails
"""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.proofs import ranks
from bench.proofs._nodes import NodesJob
from sentinel.demo.inbox import Sent
from sentinel.demo.network import find_hindrance, open_namespaces

NODES, RANKS_A_NODE = 4, 2
RUN_ID = "faults"
SETTINGS = """
[[receivers]]
name = "pager"
type = "webhook"
url = "http://%s/"
severities = ["critical"]
"""
LONG = ("evaluate", "export", "write_a_checkpoint", "recompile", "declared", "afterwards")
LONG_SECONDS = 100.0
"""Seconds that each of `LONG` takes: more than the limit of a hang (ten times the longest step, at least 60 s)."""
HEALTHY = ranks.Fault("twin", "nothing", "healthy", "", "")
CASES = [
    *(fault for fault in ranks.FAULTS if fault.alert),
    *(ranks.Fault("D6", kind, kind, "", "") for kind in LONG),
    HEALTHY,
]
TRIALS = 2 * len(CASES)
SAMPLE = (4,)
"""The death of a rank: no limit has to pass before it is reported."""
ALLOWED_SECONDS = {"Hang": 1.0, "RankLost": 2.0, "CollectiveDesync": 10.0}
"""Alert -> most seconds from the fault until it fires; a hang's count from its limit.

Collectives are compared every 10 s (docs/hang.md). A replica that differs is found by steps: CHECKSUM_STEPS.
"""
CHECKSUM_STEPS = 1024
"""Most steps between two checksums of replicas if steps are short (hooks/core/governor.py)."""
TELL_SECONDS = 5.0 + 5.0
"""Seconds that a page waits for the cause (docs/cluster.md), and for others of its group (`[grouping] wait`)."""
LOAD_SECONDS = 10.0
"""Seconds of delay allowed to a machine that has two cores for 20 processes."""
QUIET_SECONDS = 15.0
"""Seconds after the page in which a second one would come: a group is held back for 5 s."""
LIMIT_SECONDS = 400.0
"""Limit of each wait: torch alone may take minutes to start."""


def choose_trial(seed: int) -> tuple[ranks.Fault, int]:
    """Return the fault and its rank: first each fault on any node but the coordinator's, then each once more there."""
    around, case = divmod(seed, len(CASES))
    ranks_there = range(RANKS_A_NODE) if around else range(RANKS_A_NODE, NODES * RANKS_A_NODE)
    return CASES[case], random.Random(seed).choice(ranks_there)


def run_trial(seed: int) -> dict[str, Any]:
    """Run one job, and check its page or its silence."""
    fault, rank = choose_trial(seed)
    if hindrance := find_hindrance():
        return {"case": f"not run: {hindrance}"}
    with tempfile.TemporaryDirectory(prefix="n") as folder, open_namespaces(NODES) as network:
        program = ["-m", "bench.proofs._nodes_faults_job", fault.kind, f"{folder}/go-on", str(LONG_SECONDS), str(rank)]
        job = NodesJob(
            Path(folder), network, program, run_id=RUN_ID, ranks_a_node=RANKS_A_NODE,
            settings=SETTINGS % network.inbox, environment={"GLOO_SOCKET_IFNAME": network.interface},
        )  # fmt: skip
        with contextlib.closing(job):
            trial = _Trial(job, fault, rank)
            try:
                trial.begin()
                return {"case": f"{fault.id} {fault.name}", **(trial.check() if fault.alert else trial.stay_silent())}
            except AssertionError as error:
                raise AssertionError(f"{fault.id} {fault.name}, rank {rank}: {error}\n{trial.describe()}") from None


class _Trial:
    def __init__(self, job: NodesJob, fault: ranks.Fault, rank: int) -> None:
        self._job, self._fault, self._rank, self._node = job, fault, rank, rank // RANKS_A_NODE
        self._began = self._step = self._longest = 0.0
        self._incidents: list[Any] = []

    def begin(self) -> None:
        """Wait until the nodes have met, let training begin, and wait for the fault."""
        self._await(lambda: self._job.has_met, "the nodes to meet")
        (self._job.root / "met").touch()
        self._await((self._job.root / "fault").exists, "the fault")
        self._began, self._step, self._longest = map(float, (self._job.root / "fault").read_text().split())

    def check(self) -> dict[str, Any]:
        """Check that exactly one page comes, the right one, in time; return what was counted."""
        fault, node = self._fault, self._node
        words = [fault.words.format(rank=self._rank), f"rank {self._rank} ", f"node {node}"]
        self._await(lambda: bool(self._job.inbox.take()), "a page")
        if fault.alert == "Hang":
            (survey,) = self._job.run_command((node + 2) % NODES, "hang")
            _expect_words(survey["cause"], words, "`sentinel hang`")
        quiet = time.monotonic() + QUIET_SECONDS
        self._await(lambda: time.monotonic() > quiet, "a second page")
        # An ended job's incident is only in the history of the node that had the fault.
        self._incidents = self._job.run_command(node if fault.alert == "RankLost" else (node + 1) % NODES, "incidents")
        (page, *more) = self._job.inbox.pages
        assert not more, "there are more pages"
        assert (page.alert, page.run_id) == (fault.alert, RUN_ID), "the page is of another alert"
        _expect_words(f"{page.summary}; {page.cause}", words, "the page")
        critical = [case for case in self._incidents if case["severity"] == "critical"]
        problems = {
            case["parent"] or case["id"] for case in critical
        }  # a hang may follow on a warning of UnevenBatches
        told = [case for case in critical if case["alert"] == fault.alert]
        assert (len(problems), len(told)) == (1, 1), "there are other incidents"
        _expect_words(told[0]["diagnosis"]["cause"], words[:2], "`sentinel incidents`")
        return {
            "on the coordinator's node": int(node == 0),
            **self._check_delay(told[0], page),
            "consequences": len(critical) - 1,
            "warnings beside it": len(self._incidents) - len(critical),
        }

    def stay_silent(self) -> dict[str, Any]:
        """Check that nothing is sent until the job has ended, and that it ends well; return what was counted."""
        assert self._longest < LONG_SECONDS / 10, f"a step took {self._longest:.1f} s: the limit of a hang is too long"
        self._await(lambda: self._job.over, "the end of the job")
        self._job.inbox.take()
        assert not self._job.inbox.messages, "people were told"
        assert all(node.returncode == 0 for node in self._job.nodes), "the job failed"
        self._incidents = [case for node in range(NODES) for case in self._job.run_command(node, "incidents")]
        assert all(case["severity"] != "critical" for case in self._incidents), "there are incidents"
        return {"on the coordinator's node": int(self._node == 0), "warnings beside it": len(self._incidents)}

    def describe(self) -> str:
        """Describe what is known, for a failure's message."""
        cases = [(case["id"], case["alert"], case["summary"], case["diagnosis"]["cause"]) for case in self._incidents]
        said = [f"--- node {node}\n{self._job.said(node)[-3000:]}" for node in range(NODES)]
        return "\n".join([*map(str, self._job.inbox.messages), *map(str, cases), *said])

    def _check_delay(self, case: dict[str, Any], page: Sent) -> dict[str, float]:
        limit = re.search(r"\(limit (\d+) s\)", page.summary)
        late = case["time"] - self._began - (float(limit[1]) if limit else 0.0)
        if page.alert == "ReplicaDivergence":
            assert case["step"] <= self._step + CHECKSUM_STEPS, f"it fired at step {case['step']}"
        else:
            assert late <= ALLOWED_SECONDS[page.alert] + LOAD_SECONDS, f"it fired {late:.1f} s late"
        told_seconds = page.time - case["time"]
        assert told_seconds <= TELL_SECONDS + LOAD_SECONDS, f"people were told {told_seconds:.1f} s later"
        return {"fired after, seconds": round(late, 2), "told after that, seconds": round(told_seconds, 2)}

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.2)


def _expect_words(text: str, words: list[str], where: str) -> None:
    missing = [word for word in words if word not in text]
    assert not missing, f"{where} does not say {missing}: {text}"
