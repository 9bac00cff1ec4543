"""Where ranks disagree over a collective: who waits in it, who never came, who issued something else.

Ranks number the collectives of a group alike (`sentinel.flight`). The first number that some rank issued and that is
not over is where the run stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from sentinel.flight import Collective, Flight

_SAME_SIZES = {"all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "_reduce_scatter_base"}
"""Operations that need inputs of one shape on all ranks. `broadcast` of gloo and NCCL, too."""


class Standstill(msgspec.Struct, frozen=True):
    """A collective that does not come to its end. Ranks are global ones."""

    collective: Collective
    """As those that wait issued it."""
    description: str
    """What its group is for."""
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Members of the group that never issued it."""
    differing: dict[int, Collective]
    """Members that issued something else under its number."""
    unknown: tuple[int, ...]
    """Members that did not say."""

    def __str__(self) -> str:
        where = "" if self.description in ("", "default_pg") else f" in group {self.description}"
        return f"{self.collective}, number {self.collective.seq}{where}"


def standstill(flights: Mapping[int, Flight], world: int) -> Standstill | None:
    """Where the ranks stand; None where no rank is in a collective. Of several groups, the one that stood still first.

    `flights`: rank -> what it did last, as far as it said.
    """
    found = [_in_group(name, flights, world) for name in {name for each in flights.values() for name in each.groups}]
    return min((each for each in found if each is not None), key=lambda each: each.collective.created, default=None)


def desync(flights: Mapping[int, Flight], world: int) -> Standstill | None:
    """The first collective that ranks issued as different operations, or with sizes that do not fit, whether it is over
    or not: gloo may mix their contents without an error."""
    issued: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank in sorted(flights):
        for one in flights[rank].collectives:
            issued[one.group, one.seq].setdefault(rank, one)
    for (name, _), ones in sorted(issued.items()):
        first, *others = ones
        differing = {rank: ones[rank] for rank in others if not fits(ones[first], ones[rank])}
        if differing:
            group = flights[first].groups[name]
            silent = set(group.ranks or range(world)) - set(ones)
            same = tuple(rank for rank in ones if rank not in differing)
            return Standstill(ones[first], group.description, same, (), differing, tuple(sorted(silent)))
    return None


def fits(one: Collective, other: Collective) -> bool:
    """Whether two ranks' collectives of one number can be the same."""
    return one.op == other.op and (one.op not in _SAME_SIZES or _elements(one) == _elements(other))


def _elements(collective: Collective) -> list[int]:
    counts = []
    for size in collective.sizes:
        count = 1
        for extent in size:
            count *= extent
        counts.append(count)
    return counts


def _in_group(name: str, flights: Mapping[int, Flight], world: int) -> Standstill | None:
    known = {rank: flight.groups[name] for rank, flight in flights.items() if name in flight.groups}
    stuck = {rank: group for rank, group in known.items() if group.enqueued > group.completed}
    if not stuck:
        return None
    seq = min(group.completed for group in stuck.values()) + 1
    members = next((group.ranks for group in known.values() if group.ranks), tuple(range(world)))
    waiting = [rank for rank in sorted(stuck) if stuck[rank].completed < seq]
    first = next((one for rank in waiting if (one := flights[rank].issued(name, seq)) is not None), None)
    if first is None:
        return None
    missing, differing, unknown = [], {}, []
    for rank in members:
        if rank not in flights:
            unknown.append(rank)
        elif rank not in known or known[rank].enqueued < seq:
            missing.append(rank)
        elif (one := flights[rank].issued(name, seq)) is not None and not fits(first, one):
            differing[rank] = one
    return Standstill(
        first,
        next(iter(known.values())).description,
        tuple(rank for rank in waiting if rank not in differing),
        tuple(missing),
        differing,
        tuple(unknown),
    )
