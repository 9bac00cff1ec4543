"""Where the ranks of all nodes of a job stand, and the cause of an alert that this decides.

    a Hang fires on a node -> its event -> the coordinator's JobIncident -> JobCauses asks the ranks of all nodes
        -> the cause, by the analysis that one node has -> the job's incident, and its page

The page waits for it for at most `HOLD_SECONDS`; what comes later is in the incident, and no news.
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
"""The ranks of a node get two seconds to say where they stand."""
HOLD_SECONDS = 5.0
"""For which people are not told, at most: nodes get 3 s to answer (`inquiry.ANSWER_SECONDS`)."""


class Positions(NamedTuple):
    """Where ranks stand, as far as their nodes said."""

    ranks: Mapping[int, Rank]
    """Copies, that nothing changes."""
    unasked: Mapping[int, str]
    """As in `Evidence`."""
    not_asked: list[str]
    """What is missing, in words."""


async def survey_ranks(watch: WatchedRun) -> None:
    """Have this node's ranks say where they stand, until all have, or time is up."""
    hang_report.begin_survey([watch], time.monotonic())
    for _ in range(LOOKS):
        if watch.ingest.stalls.surveyed:
            break
        await asyncio.sleep(LOOK_SECONDS)


async def gather_positions(watch: WatchedRun, membership: Membership) -> Positions:
    """Have the ranks of all nodes say where they stand."""
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
    """The cause of an alert by the positions of all nodes' ranks; None where they say nothing. `stalled`: the ranks
    that it fired for."""
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
    """Of one run. Works where its node is the coordinator."""

    def __init__(self, watch: WatchedRun, membership: Membership) -> None:
        self._watch, self._membership = watch, membership
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, incidents: JobIncidents, incident: JobIncident) -> None:
        """Ask the ranks, and have the incident explained. It is kept from people for a few seconds."""
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
