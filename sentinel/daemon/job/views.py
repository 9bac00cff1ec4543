"""The whole job, seen from any of its nodes: what this node answers others, and what it asks them for the command line.

The coordinator has the incidents; their evidence is on the nodes that have the cases; each node knows where its own
ranks stand. All of it is requested when needed, with a deadline, and what could not be asked is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.cluster.membership import Membership
from sentinel.cluster.protocol.questions import (
    IncidentView,
    NodeAnswer,
    Question,
    add_details,
    view_case,
    view_rank,
)
from sentinel.daemon.job import hang_report
from sentinel.daemon.job.standstill import gather_positions, survey_ranks
from sentinel.daemon.job.unasked import name_silent, name_unasked
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.case import Case
from sentinel.text import format_count


async def answer_question(watch: WatchedRun, membership: Membership, question: Question) -> NodeAnswer:
    """Answer another node's question."""
    answer = NodeAnswer(node=membership.node, attempt=watch.run.attempt.number)
    if question.what == "ranks":
        await survey_ranks(watch)
        ranks = tuple(view_rank(rank) for _, rank in sorted(watch.run.attempt.ranks.items()))
        return msgspec.structs.replace(answer, ranks=ranks)
    if question.what == "cases":
        return msgspec.structs.replace(answer, cases=tuple(map(view_case, _find_cases(watch, question.ids))))
    views = membership.list_incidents() or []
    chosen = tuple(view for view in views if not question.ids or view.case.id in question.ids)
    return msgspec.structs.replace(answer, incidents=chosen)


async def survey_job(watch: WatchedRun, membership: Membership) -> dict[str, Any]:
    """Return where the ranks of all nodes stand, for `sentinel hang`: judged as if all were on one node."""
    positions = await gather_positions(watch, membership)
    seq = max((rank.last_seq for rank in positions.ranks.values()), default=-1)
    report = await asyncio.to_thread(hang_report.describe, watch.run, positions.ranks, seq, positions.unasked)
    return report | {"answered": True, "not_asked": positions.not_asked}


async def list_incidents(watch: WatchedRun, membership: Membership) -> dict[str, Any]:
    """Return the job's incidents, and this node's cases that are in none of them: of a former attempt, or not sent in.

    `not_asked` in it: what may be missing, in words.
    """
    views, unasked = await _ask_incidents(membership, ())
    known = {name for view in views for node, name in view.sources if node == membership.node}
    own = [case for case in watch.incidents.log.cases.values() if case.id not in known]
    cases = [case.builtins() for case in own] + [_describe(view, membership.node) for view in views]
    return {"run": watch.run.name, "run_id": watch.run.run_id, "cases": cases, "not_asked": unasked}


def _describe(view: IncidentView, node: int) -> dict[str, Any]:
    """Return an incident as a dict; `own` in it: ids of this node's cases in it, as in the node's history."""
    return view.case.builtins() | {"own": [name for where, name in view.sources if where == node]}


async def find_incident(watch: WatchedRun, membership: Membership, identity: str) -> dict[str, Any]:
    """Return one incident of the job, with the evidence of its nodes."""
    views, unasked = await _ask_incidents(membership, (identity,))
    cases = [await _add_evidence(watch, membership, view, unasked) for view in views[:1]]
    return {"run": watch.run.name, "run_id": watch.run.run_id, "cases": cases, "not_asked": unasked}


async def _ask_incidents(membership: Membership, ids: tuple[str, ...]) -> tuple[list[IncidentView], list[str]]:
    views = membership.list_incidents()
    if views is not None:
        return [view for view in views if not ids or view.case.id in ids], name_silent(membership)
    parts = await membership.inquiry.ask(Question(what="incidents", ids=ids), membership.leader)
    if not parts:
        return [], name_unasked(membership, set(), [membership.leader])
    left_out = parts[0].left_out
    more = [f"{format_count(left_out, 'incident')} too many for one answer"] if left_out else []
    return [view for part in parts for view in part.incidents], name_silent(membership) + more


async def _add_evidence(
    watch: WatchedRun, membership: Membership, view: IncidentView, unasked: list[str]
) -> dict[str, Any]:
    """Return the incident with the evidence of its nodes. Nodes that did not answer are added to `unasked`."""
    nodes = sorted({node for node, _ in view.sources} - {membership.node})
    ids = {node: tuple(name for where, name in view.sources if where == node) for node in (*nodes, membership.node)}
    answers = await asyncio.gather(
        *(membership.inquiry.ask(Question(what="cases", ids=ids[node]), node) for node in nodes)
    )
    parts = [part for answer in answers for part in answer]
    found = [*_find_cases(watch, ids[membership.node]), *(case for part in parts for case in part.cases)]
    missing = name_unasked(membership, {part.node for part in parts}, nodes)
    unasked += [f"{words}; its evidence is not here" for words in missing if words not in unasked]
    return add_details(view.case, found).builtins()


def _find_cases(watch: WatchedRun, ids: Sequence[str]) -> list[Case]:
    return [case for case in watch.incidents.log.cases.values() if case.id in ids]
