"""Which rank is missing in which collective, and how it ended: from what a job left behind."""

from __future__ import annotations

from sentinel.aftermath.files import Remains
from sentinel.aftermath.words import Failure, failures_of
from sentinel.diagnose.collectives import Standstill, desync, standstill
from sentinel.diagnose.evidence import NOT_KNOWN, Confidence, Finding
from sentinel.diagnose.ranks import named
from sentinel.flight import Flight

_SHOWN = 8


def verdict(found: Remains) -> Finding:
    """The cause, with what says so."""
    flights = _flights(found)
    world = max(found.ranks) + 1
    stand = standstill(flights, world)
    failures = list(failures_of(found.said))
    if stand is None:
        return _apart(desync(flights, world), failures)
    facts = [f"{named(stand.waiting)} waited in {stand}" + _patience(stand)]
    if stand.differing:
        number, other = next(iter(stand.differing.items()))
        facts += [f"rank {each} issued {one}" for each, one in list(stand.differing.items())[:_SHOWN]]
        cause = f"mismatched collectives: as number {stand.collective.seq} {named(stand.waiting)} issued "
        cause += f"{stand.collective}, rank {number} {other}"
        remedy = "all ranks must issue the same collectives in the same order: look at what depends on the rank there"
        return Finding(cause, "high", remedy, evidence=tuple(facts))
    late = (*stand.missing, *stand.unknown)
    if not late:
        cause = f"all ranks were in {stand}, and it did not come to its end"
        return Finding(cause, "medium", "look at the network and the devices between them", evidence=tuple(facts))
    return _missed(found, stand, late, failures, facts)


def _missed(
    found: Remains, stand: Standstill, late: tuple[int, ...], failures: list[tuple[int, Failure]], facts: list[str]
) -> Finding:
    theirs = [(rank, failure) for rank, failure in failures if rank in late]
    silent = [rank for rank in stand.unknown if rank not in found.ranks]
    missing = (
        (f"what {named(silent)} did: nothing of {'it' if len(silent) == 1 else 'them'} is here",) if silent else ()
    )
    who = f"{named(late)} never came to {stand}, in which {named(stand.waiting)} waited"
    if not theirs:
        remedy = f"look at what {named(late)} did then: stacks (py-spy dump), the end of the log"
        return Finding(who, "medium", remedy, (*missing, "why: no exception of theirs is here"), tuple(facts))
    rank, failure = theirs[0]
    sure: Confidence = "high" if rank in stand.missing or len(late) == 1 else "medium"
    facts.append(f"rank {rank}: {failure}")
    facts += [f"rank {each}: {other}" for each, other in theirs[1:_SHOWN] if each != rank]
    return Finding(f"{who}: before that, on rank {rank} {failure.brief}", sure, _remedy(failure), missing, tuple(facts))


def _apart(mismatch: Standstill | None, failures: list[tuple[int, Failure]]) -> Finding:
    """No rank waits in a collective, as far as is known."""
    if mismatch is not None:
        number, other = next(iter(mismatch.differing.items()))
        cause = f"mismatched collectives: as number {mismatch.collective.seq} {named(mismatch.waiting)} issued "
        return Finding(f"{cause}{mismatch.collective}, rank {number} {other}", "high")
    missing = (
        "who was in which collective: flight-recorder dumps (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT=1)",
    )
    if not failures:
        return Finding(NOT_KNOWN, "none", missing=missing)
    rank, failure = failures[0]
    facts = tuple(f"rank {each}: {one}" for each, one in failures[:_SHOWN])
    return Finding(f"the first to fail was rank {rank}: {failure.brief}", "medium", _remedy(failure), missing, facts)


def _flights(found: Remains) -> dict[int, Flight]:
    """Dumps say more than what a watchdog printed."""
    printed = {rank: said.flight for rank, said in found.said.items() if said.flight is not None}
    return printed | found.flights


def _remedy(failure: Failure) -> str:
    if "out of memory" in failure.error.lower():
        ends = (
            "; an exception in a thread ends the thread alone: hand it on, so that the rank ends"
            if failure.thread
            else ""
        )
        return f"there was not enough device memory: `sentinel memory` shows whose it is in a snapshot{ends}"
    if failure.thread:
        return "an exception in a thread ends the thread alone: hand it to the one that trains, so that the rank ends"
    return f"fix what failed at {failure.place}" if failure.place else ""


def _patience(stand: Standstill) -> str:
    return f", for {stand.collective.timeout:.0f} s" if stand.collective.timeout else ""
