"""The nodes of a job, and their number."""

from __future__ import annotations

from sentinel import wire
from sentinel.config.cluster import Meeting
from sentinel.text import name_nodes


def count_nodes(identity: wire.Identity) -> int:
    """Return how many nodes the job has ranks on, as far as the launcher says."""
    return -(-identity.world_size // (identity.local_world_size or identity.world_size))


def list_job_nodes(identity: wire.Identity) -> tuple[int, ...]:
    """Return the numbers of the nodes that the job has ranks on."""
    return identity.members.nodes or tuple(range(count_nodes(identity)))


def count_candidates(meeting: Meeting, identity: wire.Identity) -> int:
    """Return how many nodes may be the coordinator, from node 0 on; some of them may be left out."""
    return min(meeting.candidates, identity.members.whole or count_nodes(identity))


def describe_shrink(members: wire.Members, world_size: int) -> str:
    """Describe what is left of a job that began with more nodes; empty: all is. `world_size`: the present attempt's."""
    if not members.left_out:
        return ""
    left, whole = len(members.nodes), members.whole
    ranks = f"world size {world_size} of {world_size * whole // left}, and as much less in each global batch"
    return f"{left} of {whole} nodes: without {name_nodes(members.left_out)} (--allow-shrink); {ranks}"
