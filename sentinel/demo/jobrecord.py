"""The outcome of a job over several nodes, of which one had a fault: one page, and all nodes back together."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sentinel.demo.inbox import Sent
from sentinel.demo.record import LossCurve

JobFault = Literal["spike", "kill", "hang", "cut"]
CUT_SECONDS = 20.0
"""Seconds for which the link is down: more than `HANG_SECONDS`, and less than the 30 s after which a node that is cut
off notifies people by itself."""
HANG_SECONDS = 10.0
"""Limit of the demo's rule Hang, in seconds."""


class JobKind(msgspec.Struct, frozen=True):
    """The description of a fault, and what should come of it."""

    alerts: tuple[str, ...]
    """Alerts of which any may be the page."""
    what: str
    """What is wrong, on which node and at which step."""
    short: str
    rolls_back: bool = False
    """Whether all nodes are rolled back in memory; otherwise all are started again."""


KINDS: dict[JobFault, JobKind] = {
    "spike": JobKind(
        alerts=("LossSpike", "Divergence"), rolls_back=True, short="bad data on one node",
        what="From step {first} on, the data of node {node} are text that was never decompressed.",
    ),
    "kill": JobKind(
        alerts=("RankLost",), short="a rank of one node dies",
        what="At step {first} the rank of node {node} is killed, as by the OOM killer.",
    ),
    "hang": JobKind(
        alerts=("Hang",), short="a rank of one node stands still",
        what="At step {first} the rank of node {node} waits for a lock, and never comes to the next all_reduce.",
    ),
    "cut": JobKind(
        alerts=("Hang",), short="the network of one node is cut",
        what=f"At step {{first}} the link of node {{node}} goes down, for {CUT_SECONDS:.0f} s.",
    ),
}  # fmt: skip


class JobRecord(msgspec.Struct):
    """A job: the curve of each node's rank, and the receiver's messages."""

    fault: JobFault
    seed: int
    steps: int
    first: int
    """The step of the fault."""
    curves: list[LossCurve]
    messages: list[Sent]
    """All messages of the receiver, in order."""
    pages: list[Sent]
    """The first message of each problem."""
    fault_time: float
    """Unix seconds of the fault."""
    apart: bool
    """Whether each node had a network of its own."""
    run_id: str
    state: str
    """Folder of the coordinator's history."""
    python: str
    torch: str
    seconds: float

    @property
    def nodes(self) -> int:
        return len(self.curves)

    @property
    def page(self) -> Sent | None:
        """The page of the fault."""
        return self.pages[0] if self.pages else None

    @property
    def later(self) -> list[Sent]:
        """Later messages about the problem of the page, which page no one again."""
        return [message for message in self.messages if self.page and message.key == self.page.key][1:]

    @property
    def began_at(self) -> float:
        """Unix seconds of the first step."""
        return min(curve.times[0] for curve in self.curves)

    @property
    def fault_at(self) -> float:
        """The fault in seconds since the first step."""
        return self.fault_time - self.began_at

    @property
    def back_at(self) -> float | None:
        """When all nodes trained again, in seconds since the first step; None if they did not."""
        moments = [find_return(curve, self.fault_time) for curve in self.curves]
        return None if None in moments else max(moment for moment in moments if moment) - self.began_at

    @property
    def span(self) -> float:
        """Length of the x axis, in seconds."""
        return max(curve.times[-1] for curve in self.curves) - self.began_at

    def summary(self) -> dict[str, Any]:
        """Return what `sentinel demo --json` prints, without the paths of the files."""
        return {
            "fault": self.fault,
            "nodes": self.nodes,
            "networks": "namespaces" if self.apart else "loopback",
            "seed": self.seed,
            "steps": self.steps,
            "fault_at_step": self.first,
            "run_id": self.run_id,
            "pages": msgspec.to_builtins(self.pages),
            "messages": len(self.messages),
            "starts": [curve.starts for curve in self.curves],
            "rollbacks": [msgspec.to_builtins(curve.rollbacks) for curve in self.curves],
            "weights": [curve.weights for curve in self.curves],
            "seconds_to_page": round(self.page.time - self.fault_time, 1) if self.page else None,
            "seconds_to_return": round(self.back_at - self.fault_at, 1) if self.back_at is not None else None,
            "seconds": round(self.seconds, 1),
        }


def find_return(curve: LossCurve, since: float = 0.0) -> float | None:
    """Return when a rank did its first step after a restart or a rollback later than `since`; None: it did none."""
    rolled = {rollback.at + 1 for rollback in curve.rollbacks}
    for place, (step, moment) in enumerate(zip(curve.steps, curve.times, strict=True)):
        if moment > since and (place in curve.places[1:] or step in rolled):
            return moment
    return None


def count_kept_steps(curve: LossCurve) -> list[float]:
    """Return the progress of the training at each step, in steps without those that rollbacks gave up."""
    return [float(step - sum(back.lost_steps for back in curve.rollbacks if back.at < step)) for step in curve.steps]


def find_failure(job: JobRecord) -> str:
    """Return what the demo did not show, in words; "" if it showed everything."""
    kind = KINDS[job.fault]
    if not job.pages:
        return "the receiver got no page"
    if len(job.pages) > 1:
        return f"the receiver got {len(job.pages)} pages: {', '.join(f'{p.alert} of {p.run_id}' for p in job.pages)}"
    if job.pages[0].alert not in kind.alerts:
        return f"the page was {job.pages[0].alert}, not {' or '.join(kind.alerts)}"
    first = job.curves[0]
    for node, curve in enumerate(job.curves):
        if (curve.rollbacks, curve.starts) != (first.rollbacks, first.starts):
            return f"node {node} went back otherwise than node 0: {curve.rollbacks}, {curve.starts}"
        if curve.weights != first.weights:
            return f"the weights of node {node} are not those of node 0"
    if kind.rolls_back and not first.rollbacks:
        return "the nodes were not rolled back"
    if not kind.rolls_back and len(first.starts) != 2:
        return f"the nodes were started {len(first.starts)} times"
    return ""
