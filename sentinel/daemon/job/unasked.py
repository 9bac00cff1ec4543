"""Which nodes of a job could not be asked, and why, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentinel.cluster.membership import Membership

NAMED = 8
"""Most nodes that are named."""


def name_unasked(membership: Membership, answered: set[int], wanted: Iterable[int] | None = None) -> list[str]:
    """Return which nodes gave no answer, and why, in words. `wanted`: nodes that were asked; None: all of the job."""
    job = membership.status()
    if job["view"] in ("local view", "alone"):
        return [f"the other nodes: {job['absence']}; this is what this node sees alone"]
    nodes = job["members"] if wanted is None else wanted
    missing = [pair for pair in _list_missing(job, answered) if pair[0] in nodes]
    words = [_explain_silence(node, known) for node, known in missing[:NAMED]]
    return words + ([f"{len(missing) - NAMED} more nodes"] if len(missing) > NAMED else [])


def name_silent(membership: Membership) -> list[str]:
    """Return the nodes that the coordinator does not hear, in words: it knows what they had sent before."""
    heard = {node["node"] for node in membership.status()["nodes"] if node["state"] in ("alive", "left")}
    return name_unasked(membership, heard)


def find_unasked_ranks(membership: Membership, answered: set[int]) -> dict[int, str]:
    """Return ranks of nodes that gave no answer, each with its node and why, in words; as far as nodes are known."""
    missing = _list_missing(membership.status(), answered)
    return {int(rank): _explain_silence(node, known) for node, known in missing if known for rank in known["ranks"]}


def _list_missing(job: dict[str, Any], answered: set[int]) -> list[tuple[int, dict[str, Any] | None]]:
    """Return the job's nodes without an answer, except this one, and what is known of each."""
    known = {node["node"]: node for node in job["nodes"]}
    return [(node, known.get(node)) for node in job["members"] if node not in answered and node != job["node"]]


def _explain_silence(node: int, known: dict[str, Any] | None) -> str:
    if known is None:
        return f"node {node}: never heard"
    why = {"silent": f"silent for {known['silent_seconds']:.0f} s", "left": "its ranks have ended"}
    return f"node {node} ({known['hostname']}): {why.get(known['state'], 'no answer in time')}"
