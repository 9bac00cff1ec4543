"""Lines of `sentinel status` about the other nodes of a run's job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sentinel.text import describe_node_state, format_count, name_nodes


def lines(job: dict[str, Any]) -> list[str]:
    """Return lines on the job: which nodes are there, which are missing, and which incidents are open."""
    found = [f"  job       {describe_view(job)}"]
    if shrunk := describe_shrink(job):
        found.append(f"            {shrunk}")
    if job["no_orders"]:
        found.append(f"            no rollback, stop or restart of all nodes: {job['no_orders']}")
    if job["trouble"]:
        found.append(f"            {job['trouble']}")
    if job["refused"]:
        found.append(f"            {job['refused']} messages of other nodes refused")
    if rejected := describe_rejected(job):
        found.append(f"            {rejected}")
    if job["dropped"]:
        found.append(
            f"            {job['dropped']} incidents of this node never handed to a coordinator: too many waited"
        )
    found += [f"  node {node['node']:<4} {describe_node(job, node)}" for node in job["nodes"]]
    if missing := describe_missing(job):
        found.append(f"            {missing}")
    for incident in job["incidents"]:
        found.append(f"            {incident['alert']} open on {name_nodes(incident['nodes'])}")
    return found


def is_stale(job: Mapping[str, Any]) -> bool:
    """Whether the coordinator is not heard, so that what is known of other nodes is from its last message."""
    return job["view"] in ("local view", "alone", "left out")


def describe_view(job: Mapping[str, Any]) -> str:
    """Return which node this is, and whether it hears the coordinator."""
    absence = job.get("absence") or "the coordinator is not heard"  # a daemon of an earlier version says no more
    views = {
        "coordinator": f"coordinator, at {job['address']}",
        "joined": f"node {job['node']}, coordinator at {job['address']}",
        "local view": f"node {job['node']}, local view only: {absence}",
        "left out": f"node {job['node']}, {absence}",
        "alone": f"node {job['node']}, local view only, and tells people by itself: {absence}",
    }
    return views[job["view"]]


def describe_shrink(job: Mapping[str, Any]) -> str:
    """Return what is left of the job if it went on without some of its nodes; empty if it did not."""
    return str(job.get("shrunk", ""))  # a daemon of an earlier version does not say


def describe_rejected(job: Mapping[str, Any]) -> str:
    """Return how many connections to this node's port failed, and from where; empty: none is known."""
    if not job.get("rejected"):  # None: not counted here; a daemon of an earlier version does not say
        return ""
    count = format_count(job["rejected"], "connection")
    return f"at least {count} not let in, last from {', '.join(job['rejected_from'])}: a wrong secret or certificate?"


def describe_node(job: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return a node of the job in words: its host, whether it is heard, its step and its share of incidents."""
    state = describe_node_state(node, stale=is_stale(job) and node["node"] != job["node"])
    blame = f", was in {said}" if (said := describe_blame(job, node)) else ""
    return f"{node['hostname']}, {state}, step {node['step']}{blame}"


def describe_blame(job: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return in how many of the job's incidents a node was; empty: in none."""
    count = job.get("blame", {}).get(str(node["node"]), 0)  # a daemon of an earlier version does not say
    return f"{count} of {format_count(job['blamed_incidents'], 'incident')}" if count else ""


def describe_missing(job: Mapping[str, Any]) -> str:
    """Return how many nodes were never heard; empty where none is missing."""
    missing = job["expected"] - len(job["nodes"])
    return f"{missing} of {job['expected']} nodes not heard yet" if missing > 0 else ""
