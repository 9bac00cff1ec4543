"""Where the ranks of all nodes of a job stand, and the cause of an alert that follows from it.

    a Hang fires on a node -> its event -> the coordinator's JobIncident -> JobCauses asks the ranks of all nodes
        -> the cause, by the analysis that a single node uses -> the job's incident, and its page

The page waits for the cause for at most `HOLD_SECONDS`; a later cause is added to the incident without a message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sentinel.cluster.membership import Membership
from sentinel.cluster.protocol.job_incident import JobIncident, JobIncidents
from sentinel.cluster.protocol.questions import Question, restore_rank, view_rank
from sentinel.daemon.job import hang_report
from sentinel.daemon.job.unasked import find_unasked_ranks, name_unasked
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.diagnose.explanations import find_explanation
from sentinel.runs import Rank
from sentinel.runs.steps import RunStep
from sentinel.text import format_count

log = logging.getLogger(__name__)

LOOK_SECONDS, LOOKS = 0.05, 40
"""Seconds between two looks, and their number: the ranks of a node have two seconds to say where they stand."""
HOLD_SECONDS = 5.0
"""Most seconds for which the page is held back: nodes have 3 s to answer (`inquiry.ANSWER_SECONDS`)."""


class Positions(NamedTuple):
    """Where ranks stand, as far as their nodes answered."""

    ranks: Mapping[int, Rank]
    """Copies of the ranks, which do not change any more."""
    unasked: Mapping[int, str]
    """Ranks that could not be asked, and why, as in `Evidence`."""
    not_asked: list[str]
    """What is missing, in words."""


async def survey_ranks(watch: WatchedRun) -> None:
    """Ask this node's ranks where they stand, and wait until all have answered or time is up."""
    hang_report.begin_survey([watch], time.monotonic())
    for _ in range(LOOKS):
        if watch.ingest.stalls.surveyed:
            break
        await asyncio.sleep(LOOK_SECONDS)


async def gather_positions(watch: WatchedRun, membership: Membership) -> Positions:
    """Ask the ranks of all nodes where they stand, and return what they answered."""
    _, parts = await asyncio.gather(survey_ranks(watch), membership.inquiry.ask(Question(what="ranks")))
    attempt = watch.run.attempt
    ranks = {number: restore_rank(view_rank(rank)) for number, rank in attempt.ranks.items()}
    fresh = [part for part in parts if part.attempt == attempt.number]
    for view in (view for part in fresh for view in part.ranks):
        if view.identity.rank not in ranks:
            ranks[view.identity.rank] = restore_rank(view)
    answered = {part.node for part in fresh}
    left_out = {part.node: part.left_out for part in fresh if part.left_out}
    not_asked = [
        *name_unasked(membership, answered),
        *(f"node {node}: {format_count(count, 'rank')} too many for one answer" for node, count in left_out.items()),
    ]
    return Positions(ranks, find_unasked_ranks(membership, answered), not_asked)


def explain_over_nodes(alert: str, stalled: list[int], positions: Positions) -> Finding | None:
    """Return the cause of an alert from the positions of all nodes' ranks; None if they show none.

    `stalled`: the ranks that the alert fired for.
    """
    if all(rank.flight is None for rank in positions.ranks.values()):
        return None
    explain = find_explanation(alert)
    assert explain is not None
    seq = max((rank.last_seq for rank in positions.ranks.values()), default=-1)
    last = RunStep(-1, time.time(), {}, {})
    evidence = Evidence(
        alert=alert, since=seq, until=seq, last=last, ranks=stalled, live=positions.ranks, unasked=positions.unasked
    )
    found = explain(evidence)
    return found if found.confidence != "none" else None


class JobCauses:
    """Finds the causes of a job's incidents, for a run whose node is the coordinator."""

    def __init__(self, watch: WatchedRun, membership: Membership) -> None:
        self._watch, self._membership = watch, membership
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, incidents: JobIncidents, incident: JobIncident) -> None:
        """Ask the ranks, and explain the incident. Its page is held back for a few seconds."""
        if incident.attempt != self._watch.run.attempt.number:  # its ranks are gone
            incidents.explain(incident, None)
            return
        asyncio.get_running_loop().call_later(HOLD_SECONDS, self._let_go, incident)
        self._tasks.add(task := asyncio.create_task(self._find_cause(incidents, incident)))
        task.add_done_callback(self._tasks.discard)

    def _let_go(self, incident: JobIncident) -> None:
        if incident.awaits_verdict:
            incident.awaits_verdict = False
            self._membership.pass_on_incidents()

    async def _find_cause(self, incidents: JobIncidents, incident: JobIncident) -> None:
        verdict = None
        try:
            positions = await gather_positions(self._watch, self._membership)
            stalled = _list_ranks(incident.cases.values())
            verdict = await asyncio.to_thread(explain_over_nodes, incident.alert, stalled, positions)
        except Exception:
            log.exception("the cause of %s is what one node knows of it", incident.id)
        incidents.explain(incident, verdict)
        self._membership.pass_on_incidents()


def _list_ranks(cases: Iterable[Case]) -> list[int]:
    return sorted({int(member.name) for case in cases for member in case.members if member.scope == "rank"})
