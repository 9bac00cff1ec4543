"""Which nodes of a job could not be asked, why, and for how long they have not been heard, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentinel.cluster.membership import Membership

NAMED = 8
"""Most nodes that are named."""


def name_unasked(membership: Membership, answered: set[int], wanted: Iterable[int] | None = None) -> list[str]:
    """Return which nodes gave no answer, and why, in words. `wanted`: nodes that were asked; None: all of the job."""
    job = membership.status()
    alone = _explain_view(job)
    if alone and wanted is not None:
        return alone
    nodes = job["members"] if wanted is None else wanted
    missing = [pair for pair in _list_missing(job, answered) if pair[0] in nodes]
    words = [_explain_silence(job, node, known) for node, known in missing[:NAMED]]
    return alone + words + ([f"{len(missing) - NAMED} more nodes"] if len(missing) > NAMED else [])


def name_silent(membership: Membership) -> list[str]:
    """Return the nodes that the coordinator does not hear, in words: it only knows what they handed in before."""
    job = membership.status()
    return _explain_view(job) or name_unasked(membership, _list_heard(job))


def find_unasked_ranks(membership: Membership, answered: set[int]) -> dict[int, str]:
    """Return, by rank, the node that gave no answer, and why, in words; as far as the ranks' nodes are known."""
    return _find_ranks(membership.status(), answered)


def find_silent_ranks(membership: Membership) -> dict[int, str]:
    """Return the same for nodes that are not heard, without asking any."""
    job = membership.status()
    return _find_ranks(job, set() if _is_alone(job) else _list_heard(job))


def _find_ranks(job: dict[str, Any], answered: set[int]) -> dict[int, str]:
    missing = _list_missing(job, answered)
    return {
        int(rank): _explain_silence(job, node, known) for node, known in missing if known for rank in known["ranks"]
    }


def _is_alone(job: dict[str, Any]) -> bool:
    """Whether no coordinator is heard, so that it is not known what other nodes do."""
    return job["view"] in ("local view", "alone")


def _explain_view(job: dict[str, Any]) -> list[str]:
    """Return why this node sees only itself, in words; empty: it does not."""
    return [f"the other nodes: {job['absence']}; this is what this node sees alone"] if _is_alone(job) else []


def _list_heard(job: dict[str, Any]) -> set[int]:
    return {node["node"] for node in job["nodes"] if node["state"] in ("alive", "left")}


def _list_missing(job: dict[str, Any], answered: set[int]) -> list[tuple[int, dict[str, Any] | None]]:
    """Return the job's nodes without an answer, except this one, and what is known of each."""
    known = {node["node"]: node for node in job["nodes"]}
    return [(node, known.get(node)) for node in job["members"] if node not in answered and node != job["node"]]


def _explain_silence(job: dict[str, Any], node: int, known: dict[str, Any] | None) -> str:
    if known is None:
        return f"node {node}: never heard"
    silence = f"{known['silent_seconds']:.0f} s"
    alive = f"not heard of for {silence}" if _is_alone(job) else f"no answer in time, heard {silence} ago"
    why = {"alive": alive, "silent": f"silent for {silence}", "left": "its ranks have ended"}[known["state"]]
    return f"node {node} ({known['hostname']}): {why}"
