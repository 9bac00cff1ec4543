"""Finds which rank is missing in which collective, and how it ended, from what a job left behind."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sentinel.diagnose.evidence import NOT_KNOWN, Finding
from sentinel.diagnose.explainers.ranks import Reason, explain_standstill
from sentinel.diagnose.standstill.collectives import find_desync, find_standstill
from sentinel.diagnose.standstill.waits import Standstill, Wait, each_wait
from sentinel.text import name_ranks
from sentinel.toolkit.postmortem.files import Remains
from sentinel.toolkit.postmortem.first_failure import explain_first_failure, find_remedy
from sentinel.toolkit.postmortem.words import Failure, JobLog, failures_of
from sentinel.wire.flight_recorder import Flight

_SHOWN = 8
WORLD = 1 << 20
"""Most ranks: a damaged file may name any number."""


def verdict(found: Remains) -> Finding:
    """Return the cause with its evidence; no cause if all groups are complete."""
    flights = _flights(found)
    groups = [group for flight in flights.values() for group in flight.groups.values()]
    world = min(max([*found.ranks, *(rank for group in groups for rank in group.ranks)], default=0) + 1, WORLD)
    stand = find_standstill(flights, world, closed=any(group.ranks for group in groups))
    failures = list(failures_of(found.said))
    if stand is None:
        return _apart(find_desync(flights, world), found.log, flights, world)
    reasons: dict[int, Reason] = {}
    for rank, failure in failures:
        if rank in stand.culprits and rank not in reasons:
            reasons[rank] = _fail(rank, failure, failures)
    silent = [rank for wait in each_wait(stand) for rank in wait.unknown if rank not in found.ranks]
    missing = [_lack(sorted(set(silent)))] if silent else []
    if stand.kind in ("missing", "silent") and not reasons:
        missing.append("why: no exception of theirs is here")
    if stand.kind == "silent" and reasons:  # the ranks left exceptions, though no flight record
        stand = msgspec.structs.replace(stand, culprits=tuple(reasons), confidence="high", doubts=())
    return explain_standstill(stand, reasons, missing, past=True)


def _fail(rank: int, failure: Failure, failures: list[tuple[int, Failure]]) -> Reason:
    facts = [f"rank {rank}: {failure}"]
    facts += [f"rank {rank}: {other}" for each, other in failures if each == rank and other is not failure][:_SHOWN]
    return Reason(f"before that, on rank {rank} {failure.brief}", find_remedy(failure), "high", tuple(facts))


def _lack(silent: list[int]) -> str:
    return f"what {name_ranks(silent)} did: nothing of {'it' if len(silent) == 1 else 'them'} is here"


def _apart(mismatch: Wait | None, log: JobLog, flights: Mapping[int, Flight], world: int) -> Finding:
    """Return the cause if no rank is known to wait in a collective."""
    if mismatch is not None:
        return explain_standstill(Standstill("mismatch", (), "high", mismatch), {}, past=True)
    failed = log.exits or log.unplaced or log.job or list(failures_of(log.said))
    if not failed and any(each.groups for each in flights.values()):
        silent = sorted(set(range(world)) - flights.keys())
        lacks = [_lack(silent)] if silent else []
        if any(each.gloo for each in flights.values()):
            lacks.append("who sends or receives: gloo does not record it")
        cause = NOT_KNOWN if silent else ""
        return Finding(cause, "none", missing=tuple(lacks), evidence=_list_complete(flights))
    return explain_first_failure(log)


def _flights(found: Remains) -> dict[int, Flight]:
    """Return flight records by rank: dumps, which say more, otherwise what watchdogs printed."""
    printed = {
        rank: msgspec.structs.replace(said.flight, whole=False)
        for rank, said in found.said.items()
        if said.flight is not None
    }
    return printed | found.flights


def _list_complete(flights: Mapping[int, Flight]) -> tuple[str, ...]:
    """Return one line per group: how many collectives are complete, on which ranks."""
    complete: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank in sorted(flights):
        for group in flights[rank].groups.values():
            if group.completed:
                label = group.description if group.description not in ("", "undefined") else group.name
                complete.setdefault((label, group.ranks), {})[rank] = group.completed
    lines = []
    for (label, _), counts in list(complete.items())[:_SHOWN]:
        least, most = min(counts.values()), max(counts.values())
        count = f"{most}" if least == most else f"{least} to {most}"
        lines.append(f"group {label}: {count} collectives complete on {name_ranks(list(counts))}")
    return tuple(lines)
