"""Find ranks that hold up the others, and ranks that issued collectives that do not fit: live and post mortem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from sentinel.diagnose.standstill.group_members import GroupMembers, Key, find_commonest, fit
from sentinel.diagnose.standstill.wait_graph import WaitGraph, name_minority
from sentinel.diagnose.standstill.waits import Standstill, Wait
from sentinel.wire.flight_recorder import Collective, Flight


def find_standstill(
    flights: Mapping[int, Flight],
    world: int,
    elsewhere: Collection[int] = (),
    stacks: Mapping[int, bool] | None = None,
    *,
    closed: bool = True,
) -> Standstill | None:
    """Return which ranks hold up which; None where no rank is in an operation.

    `flights`: rank -> its last operations, as far as known. `elsewhere`: ranks that are known to be in no operation,
    whatever they left behind. `stacks`: rank -> whether its stack is in torch.distributed. `closed`: whether it is
    known that there are no more ranks than `world`.
    """
    graph = WaitGraph(flights, world, elsewhere, stacks or {}, closed)
    found = graph.judge()
    if found is None or found.kind == "mismatch" or (earlier := find_desync(flights, world)) is None:
        return found
    return Standstill("mismatch", name_minority(earlier), "high", earlier, (found.wait, *found.others))


def find_desync(flights: Mapping[int, Flight], world: int) -> Wait | None:
    """Return the first collective that ranks issued as different operations, or with sizes that do not fit, whether it
    is over or not: gloo may mix their contents without an error."""
    members = GroupMembers(flights, world)
    issued: dict[tuple[Key, int], dict[int, Collective]] = defaultdict(dict)
    for rank in sorted(flights):
        for one in flights[rank].collectives:
            if (key := members.keys.get((rank, one.group))) is not None:
                issued[key, one.seq].setdefault(rank, one)
    for (key, _), ones in sorted(issued.items(), key=lambda each: min(one.created for one in each[1].values())):
        reference = find_commonest(ones.values())
        differing = {rank: one for rank, one in ones.items() if not fit(reference, one)}
        if differing:
            silent = tuple(sorted(set(key[1]) - set(flights)))
            same = tuple(rank for rank in ones if rank not in differing)
            return Wait(reference, members.descriptions[key], same, differing=differing, unknown=silent)
    return None
