"""Find which ranks are in which group, and whether what they issued under one number can be one collective."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from sentinel.diagnose.standstill.waits import ROOTED
from sentinel.wire.flight_recorder import Collective, Flight

_SAME_SIZES = {"allreduce", "broadcast", "reduce", "reducescatter", "reducescatterbase"}
"""Operations that need inputs of one shape on all ranks, written without underscores: a watchdog's line writes them
otherwise than a record. `broadcast` of gloo and NCCL, too."""

Key = tuple[str, tuple[int, ...]]
"""Name of a group, and its members: groups that were split off together share a name."""


class GroupMembers:
    """The members of each group: from a dump, or else all ranks that ever issued something in it."""

    def __init__(self, flights: Mapping[int, Flight], world: int, closed: bool = True) -> None:
        self.keys: dict[tuple[int, str], Key] = {}
        """(rank, name of a group) -> the group's key."""
        self.descriptions: dict[Key, str] = {}
        self.uncertain: set[Key] = set()
        self.open: set[str] = set()
        """Names of groups that may have members beyond the known ranks."""
        declared: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        issuers: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(flights):
            for name, group in flights[rank].groups.items():
                if group.ranks:
                    declared[name].add(group.ranks)
                elif group.description == "default_pg" or name == "0":
                    declared[name].add(tuple(range(world)))
                else:
                    issuers[name].append(rank)
                if not closed and not group.ranks:
                    self.open.add(name)
        for rank in sorted(flights):
            for name, group in flights[rank].groups.items():
                ranks = group.ranks or next((each for each in declared[name] if rank in each), ())
                key = name, ranks or tuple(issuers[name])
                self.keys[rank, name] = key
                self.descriptions.setdefault(key, group.description)
                if not ranks and not _all_came(flights, world, *key):
                    self.uncertain.add(key)


def _all_came(flights: Mapping[int, Flight], world: int, name: str, ranks: tuple[int, ...]) -> bool:
    """Return whether no other rank can be in the group: a collective that all members must join is over, and no other
    rank's recorder has forgotten whether it took part."""
    if len(ranks) == world:
        return True
    outside = [flights.get(rank) for rank in range(world) if rank not in ranks]
    return all(each is not None and each.whole for each in outside) and any(
        one.group == name and one.done and one.op not in ROOTED for rank in ranks for one in flights[rank].collectives
    )


def fit(one: Collective, other: Collective) -> bool:
    """Return whether two ranks' collectives of one number can be the same."""
    types = one.dtype == other.dtype or not (one.dtype and other.dtype)
    return _signature(one) == _signature(other) and (types or one.op.replace("_", "") not in _SAME_SIZES)


def _signature(one: Collective) -> tuple[str, tuple[int, ...]]:
    op = one.op.replace("_", "")
    return op, tuple(count_elements(one)) if op in _SAME_SIZES else ()


def count_elements(collective: Collective) -> list[int]:
    counts = []
    for size in collective.sizes:
        count = 1
        for extent in size:
            count *= extent
        counts.append(count)
    return counts


def find_commonest(ones: Iterable[Collective]) -> Collective:
    """Return what most ranks issued; in a tie, what the first of them issued."""
    each = list(ones)
    kinds = [(*_signature(one), one.dtype) for one in each]
    return each[kinds.index(Counter(kinds).most_common(1)[0][0])]
