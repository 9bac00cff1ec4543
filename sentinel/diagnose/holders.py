"""Add what a census found to the diagnosis of creeping memory: the objects that hold it."""

from __future__ import annotations

import msgspec

from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.wire.evidence import Holder

_SOMETHING = "something keeps"
_SHOWN = 3
_SHARE = 0.2
"""Share of the rise that a holder's own tensors must be for certainty: the rest is in what the count does not see, such
as the allocator's pieces. A holder of graphs is the cause whatever its size: what they saved lies in C++."""
_NOT_SEEN = (
    "who holds it: no list, dict or variable that Python knows holds more from step to step; look at data loader "
    "workers, pinned memory, and libraries of C++"
)


def add_holders(evidence: Evidence, found: Finding, bytes_per_step: float | None) -> Finding:
    """Return the finding with the objects that hold what grows. `bytes_per_step`: of the rise, where that is known."""
    taken = evidence.census.get(evidence.ranks[0]) if evidence.ranks else next(iter(evidence.census.values()), None)
    if taken is None:
        return found
    missing = tuple(one for one in found.missing if not one.startswith("who holds it")) + taken.missing
    if not taken.steps:
        return msgspec.structs.replace(found, missing=missing)
    telling = [holder for holder in taken.holders if holder.tensors or _large(holder, bytes_per_step)]
    facts = tuple(_describe_holder(holder) for holder in telling[:_SHOWN])
    if not telling:
        return msgspec.structs.replace(found, missing=(*missing, _NOT_SEEN))
    first = telling[0]
    place = f" ({first.line})" if first.line else ""
    hook = f", which the forward hook of {first.hook} fills," if first.hook else ""
    keeps = f"{first.name}{place}{hook} keeps"
    named = _SOMETHING in found.cause
    cause = found.cause.replace(_SOMETHING, keeps) if named else f"{found.cause}: {keeps} it"
    return msgspec.structs.replace(
        found,
        cause=cause,
        keeper=f"{first.name}{place}",
        confidence="high" if first.graph or _large(first, bytes_per_step) else "medium",
        remedy=_remedy(first),
        missing=missing,
        evidence=(*found.evidence, *facts),
    )


def _large(holder: Holder, bytes_per_step: float | None) -> bool:
    return bytes_per_step is not None and holder.bytes_per_step > _SHARE * bytes_per_step


def _describe_holder(holder: Holder) -> str:
    entries = f"{holder.entries_per_step:.3g} {'entry' if holder.entries_per_step == 1 else 'entries'}"
    more = entries if holder.entries_per_step else f"{holder.bytes_per_step:.0f} bytes"
    example = f" of {holder.example}" if holder.example else ""
    if holder.nodes_per_step:
        return f"{holder.name} is the end of a graph of {holder.nodes} nodes, {holder.nodes_per_step:.3g} more a step"
    graph = ", each with the graph that made it" if holder.graph else ""
    size = f", {holder.bytes_per_step:.0f} bytes" if holder.entries_per_step else ""
    return f"{holder.name} has {holder.length} entries and gets {more}{example} a step{size}{graph}"


def _remedy(holder: Holder) -> str:
    name = holder.name.partition(",")[0]
    if holder.hook:
        return (
            f"take the hook of {holder.hook} away when it is not needed (handle.remove()), or empty {name} at each step"
        )
    if holder.graph and holder.kind in ("tensor", "container"):
        return f"{name} is computed from the loss of each step and keeps all their graphs: compute it from loss.item()"
    if holder.graph:
        return f"put loss.item(), or output.detach(), into {name}: what is put there now keeps the graph of its step"
    return f"keep the last few in {name} alone (collections.deque(maxlen=100)), or numbers in place of tensors"
