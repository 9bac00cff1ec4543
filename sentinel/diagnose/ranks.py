"""Why ranks wait for each other: the flight recorders say which rank is missing in which collective; its stacks,
its loader and its heartbeat say why.
"""

from __future__ import annotations

from collections.abc import Mapping

from sentinel.diagnose.collectives import Standstill, desync, standstill
from sentinel.diagnose.evidence import NOT_KNOWN, Confidence, Evidence, Finding
from sentinel.diagnose.stacks import Thread, training
from sentinel.heartbeat import Kind, Place
from sentinel.runs import Rank

UNEVEN = (
    "give all ranks as many batches (DistributedSampler with drop_last=True, or a fixed number of steps an epoch), or "
    "wrap the loop in `with Join([model]):`"
)
SHOWN_RANKS = 8


def across(ranks: Mapping[int, Rank]) -> Finding | None:
    """What stands between the ranks; None where no rank is in a collective, or none said so."""
    flights = {number: rank.flight for number, rank in ranks.items() if rank.flight is not None}
    world = max((rank.identity.world_size for rank in ranks.values()), default=1)
    stand = standstill(flights, world) if world > 1 else None
    if stand is None:
        return None
    facts = [f"{named(stand.waiting)} {_verb(stand.waiting, 'waits', 'wait')} in {stand}"]
    late = [rank for rank in (*stand.missing, *stand.unknown) if rank in ranks or rank in stand.missing]
    late += [rank for rank in stand.unknown if rank not in ranks]
    if stand.differing:
        return _mismatched(stand, ranks, facts)
    if not late:
        cause = f"all ranks are in {stand}, and it does not come to its end"
        remedy = (
            "look at the network and the devices between them: a link, a host that does not answer (NCCL_DEBUG=INFO)"
        )
        return Finding(cause, "medium", remedy, evidence=tuple(facts))
    return _missed(stand, late, ranks, facts)


def collective_desync(evidence: Evidence) -> Finding:
    """Which collective ranks issued differently, whether it is over or not."""
    flights = {number: rank.flight for number, rank in evidence.live.items() if rank.flight is not None}
    found = desync(flights, max((rank.identity.world_size for rank in evidence.live.values()), default=1))
    if found is None:
        return Finding(NOT_KNOWN, "none", missing=("the ranks' flight records: they have gone on",))
    facts = [f"rank {each} issued {one}" for each, one in list(found.differing.items())[:SHOWN_RANKS]]
    number, other = next(iter(found.differing.items()))
    cause = f"as number {found.collective.seq} {named(found.waiting)} issued {found.collective}, rank {number} {other}"
    return Finding(f"mismatched collectives: {cause}", "high", evidence=tuple(facts))


def named(ranks: tuple[int, ...] | list[int]) -> str:
    """Ranks, in words."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS])) + (" ..." if len(ranks) > SHOWN_RANKS else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _missed(stand: Standstill, late: list[int], ranks: Mapping[int, Rank], facts: list[str]) -> Finding:
    """Somebody never came. The first of them explains the rest."""
    reasons = [(_reason(number, ranks), number) for number in late]
    (what, remedy, confidence), first = reasons[0]
    facts += [f"rank {number} never issued it: it {text}" for (text, _, _), number in reasons[:SHOWN_RANKS]]
    missing = tuple(
        f"what rank {number} did: it gave no flight record" for number in stand.unknown if number in ranks
    ) + tuple(
        f"rank {number}: it is on another node, or not watched" for number in stand.unknown if number not in ranks
    )
    cause = (
        f"{named(late)} never came to {stand}, in which {named(stand.waiting)} {_verb(stand.waiting, 'waits', 'wait')}"
    )
    return Finding(
        f"{cause}: rank {first} {what}", confidence, remedy, missing, tuple(facts) + _stack(ranks.get(first))
    )


def _mismatched(stand: Standstill, ranks: Mapping[int, Rank], facts: list[str]) -> Finding:
    number, other = next(iter(stand.differing.items()))
    facts += [
        f"rank {each} issued {one} under that number" for each, one in list(stand.differing.items())[:SHOWN_RANKS]
    ]
    cause = (
        f"mismatched collectives: as number {stand.collective.seq} {named(stand.waiting)} issued {stand.collective}, "
        f"{named(tuple(stand.differing))} {other}"
    )
    text, remedy, _ = _reason(number, ranks)
    rank = ranks.get(number)
    if rank is not None and _exhausted(rank, ranks):
        cause, facts = f"{cause}: rank {number} {text}", [*facts, f"rank {number} {text}"]
    else:
        remedy = "all ranks must issue the same collectives in the same order: look at what depends on the rank there"
    return Finding(cause, "high", remedy, evidence=tuple(facts) + _stack(rank))


def _reason(number: int, ranks: Mapping[int, Rank]) -> tuple[str, str, Confidence]:
    """What a rank does instead, what to do about it, how sure that is."""
    rank = ranks.get(number)
    if rank is None:
        return "is not seen here", f"look at rank {number}'s own node: `sentinel hang` there", "medium"
    if rank.state == "lost":
        return (
            "has died without a word",
            "look at its log and at the kernel's (dmesg): a crash, or the OOM killer",
            "high",
        )
    if rank.state == "gone":
        return _exhausted(rank, ranks) or "has ended", UNEVEN, "high"
    main = training(rank.dump, rank.heartbeat.ident if rank.heartbeat is not None else 0)
    place = (main.users or main.frames[0]) if main is not None and main.frames else None
    at = f" at {place}" if place is not None else ""
    look = f"look at {place.file}, line {place.line}" if place is not None else f"look at rank {number}'s stacks"
    if rank.stall.kind == Kind.HOLDING:
        return f"holds the GIL{at}", f"{look}: one call into C that never returns, or waits", "high"
    if ended := _exhausted(rank, ranks):
        return f"{ended}; it is{at or ' elsewhere'}", UNEVEN, "high"
    if rank.heartbeat is not None and rank.heartbeat.place == Place.LEFT:
        return f"has left the training loop; it is{at or ' elsewhere'}", look, "high"
    if rank.heartbeat is not None and rank.heartbeat.paused:
        return f"is in the phase {rank.phase!r}{at}", f"{look}: the other ranks do not know of that phase", "high"
    doing = f"{rank.stall.kind}" if rank.stall.kind else "is elsewhere"
    return f"{doing}{at}", f"{look}: the other ranks wait until that returns", "high" if place is not None else "medium"


def _exhausted(rank: Rank, ranks: Mapping[int, Rank]) -> str:
    """That it had fewer batches than others, in words; nothing where it had as many."""
    flight = rank.flight
    if flight is None or not flight.exhausted:
        return ""
    others = {n: each.flight.batches for n, each in ranks.items() if each is not rank and each.flight is not None}
    ahead = [n for n, batches in sorted(others.items()) if batches > flight.batches]
    if not ahead and any(batches >= 0 for batches in others.values()):
        return ""
    more = f" ({named(ahead)} had more)" if ahead else ""
    return f"came to the end of its loader, after {flight.batches} batches{more}"


def _stack(rank: Rank | None, most: int = 8) -> tuple[str, ...]:
    main = training(rank.dump, rank.heartbeat.ident if rank.heartbeat else 0) if rank is not None else None
    return shown(main, most) if main is not None else ()


def shown(main: Thread, most: int = 8) -> tuple[str, ...]:
    """A stack as facts of a case."""
    return tuple(f"  {'at' if index == 0 else 'by'} {frame}" for index, frame in enumerate(main.frames[:most]))


def _verb(ranks: tuple[int, ...], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
