"""The other nodes of a run's job, in lines of `sentinel status`."""

from __future__ import annotations

from typing import Any


def lines(job: dict[str, Any]) -> list[str]:
    """Who is there, who could not be asked, and which incidents are open."""
    silent = f"the coordinator at {job['address']} is silent for {job['coordinator_silent_seconds']:.0f} s"
    views = {
        "coordinator": f"coordinator, at {job['address']}",
        "joined": f"node {job['node']}, coordinator at {job['address']}",
        "local view": f"node {job['node']}, local view only: {silent}",
        "alone": f"node {job['node']}, local view only, and tells people by itself: {silent}",
    }
    found = [f"  job       {views[job['view']]}"]
    if job["trouble"]:
        found.append(f"            {job['trouble']}")
    if job["refused"]:
        found.append(f"            {job['refused']} messages of other nodes refused")
    stale = job["view"] in ("local view", "alone")
    for node in job["nodes"]:
        state = node["state"] if node["state"] != "silent" else f"silent for {node['silent_seconds']:.0f} s"
        asked = "not asked; was " if stale and node["node"] != job["node"] else ""
        found.append(f"  node {node['node']:<4} {node['hostname']}, {asked}{state}, step {node['step']}")
    missing = job["expected"] - len(job["nodes"])
    if missing > 0:
        found.append(f"            {missing} of {job['expected']} nodes not heard yet")
    for incident in job["incidents"]:
        nodes = ", ".join(str(node) for node in incident["nodes"])
        found.append(f"            {incident['alert']} open on nodes {nodes}")
    return found
