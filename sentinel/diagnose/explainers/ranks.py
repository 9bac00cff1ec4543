"""Explain why ranks wait for each other: flight records show which rank is missing in which collective; its stacks, its
loader and its heartbeat show why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from sentinel.diagnose.evidence import Confidence, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.diagnose.standstill.collectives import find_desync, find_standstill
from sentinel.diagnose.standstill.stacks import COLLECTIVES, LOADER, Thread, training
from sentinel.diagnose.standstill.waits import Standstill, Wait, each_wait
from sentinel.runs import Rank
from sentinel.text import name_ranks
from sentinel.wire.flight_recorder import Collective
from sentinel.wire.heartbeat_page import Kind, Place

UNEVEN = (
    "give all ranks as many batches (DistributedSampler with drop_last=True, or a fixed number of steps an epoch), or "
    "wrap the loop in `with Join([model]):`"
)
SHOWN_RANKS = 8
_FRAMES = 8
"""Innermost frames of a stack that a case keeps."""


class Reason(NamedTuple):
    """Why a rank did not come to an operation."""

    text: str
    """A clause that follows a colon."""
    remedy: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()


def across(ranks: Mapping[int, Rank], unasked: Mapping[int, str] = MappingProxyType({})) -> Finding | None:
    """Explain what stands between the ranks; None where no rank is known to be in a collective. `unasked`: as in
    `Evidence`."""
    flights = {number: rank.flight for number, rank in ranks.items() if rank.flight is not None}
    world = max((rank.identity.world_size for rank in ranks.values()), default=1)
    elsewhere = {number for number, rank in ranks.items() if _is_elsewhere(rank)}
    stacks = {number: _stands_in(rank, COLLECTIVES) for number, rank in ranks.items() if rank.dump}
    stand = find_standstill(flights, world, elsewhere, stacks) if world > 1 else None
    if stand is None:
        return None
    unseen = [number for number in stand.culprits if number not in ranks]
    explained = [number for number in stand.culprits if number not in unseen[1:]]  # `missing` has the others
    reasons = {number: _reason(number, ranks, unasked) for number in explained}
    if stand.kind == "mismatch":  # an uneven loader explains it; where the rank is now does not
        reasons = {number: each for number, each in reasons.items() if each.remedy == UNEVEN}
    unknown = sorted({rank for wait in each_wait(stand) for rank in wait.unknown})
    missing = _explain_unknown(unknown, ranks, unasked)
    return name_nodes(explain_standstill(stand, reasons, missing), stand.culprits, ranks)


def _explain_unknown(unknown: Iterable[int], ranks: Mapping[int, Rank], unasked: Mapping[int, str]) -> list[str]:
    """Return why it is not known what these ranks did, a line for each reason: of 512 ranks, 504 may be on other
    nodes."""
    by_reason: dict[str, list[int]] = {}
    for number in unknown:
        reason = "no flight record" if number in ranks else unasked.get(number, _locate_unseen(ranks))
        by_reason.setdefault(reason, []).append(number)
    return [f"what {name_ranks(numbers)} did: {reason}" for reason, numbers in by_reason.items()]


def _locate_unseen(ranks: Mapping[int, Rank]) -> str:
    """Return words for where ranks are that are not in `ranks`, as far as is known."""
    seen = Counter(rank.identity.node for rank in ranks.values())
    full = all(0 < rank.identity.local_world_size <= seen[rank.identity.node] for rank in ranks.values())
    return "on another node, which was not asked" if full else "not watched, or on another node"


def name_nodes(found: Finding, culprits: Collection[int], ranks: Mapping[int, Rank]) -> Finding:
    """Return the finding with the nodes of the culprits in its cause, where ranks of several nodes are compared."""
    if len({rank.identity.node for rank in ranks.values()}) < 2:
        return found
    by_node: dict[tuple[int, str], list[int]] = {}
    for number in sorted(culprits):
        if number in ranks:
            identity = ranks[number].identity
            by_node.setdefault((identity.node, identity.hostname), []).append(number)
    places = [
        f"{name_ranks(own)} {_verb(own, 'is', 'are')} on node {node}" + (f" ({host})" if host else "")
        for (node, host), own in list(by_node.items())[:SHOWN_RANKS]
    ]
    return msgspec.structs.replace(found, cause="; ".join([found.cause, *places]), ranks=tuple(sorted(culprits)))


def explain_standstill(
    stand: Standstill, reasons: Mapping[int, Reason], missing: Iterable[str] = (), *, past: bool = False
) -> Finding:
    """Say in words which ranks hold up which. `reasons`: what is known of the culprits beside their collectives.
    `past`: the job is over."""
    wait = stand.wait
    cause, remedy = _blame(stand, past)
    first = next((rank for rank in _order_by_blame(stand) if rank in reasons), None)
    reason = reasons[first] if first is not None else None
    facts = [_describe_wait(each, past) for each in (wait, *stand.others[:SHOWN_RANKS])]
    if len(stand.others) > SHOWN_RANKS:
        facts.append(f"and {len(stand.others) - SHOWN_RANKS} more operations that are not over")
    facts += [
        f"rank {rank} issued {one}" + _format_place(one) for rank, one in list(wait.differing.items())[:SHOWN_RANKS]
    ]
    if stand.idle and stand.kind != "mismatch":
        whom = _verb(stand.idle, "it", "them")
        facts.append(f"{name_ranks(stand.idle)}: in no operation, and no rank is seen to wait for {whom}")
    confidence = stand.confidence
    if reason is not None:
        cause, remedy = f"{cause}: {reason.text}", reason.remedy or remedy
        lead = "" if stand.kind == "silent" and not past else "rank {} never issued it: "
        facts += [lead.format(rank) + reasons[rank].text for rank in stand.culprits[:SHOWN_RANKS]
                  if rank in reasons and rank != first]  # fmt: skip
        facts += reason.evidence
        if stand.kind == "missing" and confidence == "medium":
            confidence = reason.confidence
    return Finding(cause, confidence, remedy, (*missing, *stand.doubts), tuple(facts))


def _order_by_blame(stand: Standstill) -> list[int]:
    """Return the culprits, first those that the operation shows."""
    shown = {*stand.wait.missing, *stand.wait.unknown, *stand.wait.differing}
    return sorted(stand.culprits, key=lambda rank: (rank not in shown, rank))


def _blame(stand: Standstill, past: bool) -> tuple[str, str]:
    """Return the cause and what to do about it, by what the collectives alone show."""
    wait, who = stand.wait, name_ranks(stand.culprits)
    waits = "waited" if past else _verb(wait.waiting, "waits", "wait")
    order = "all ranks must issue the same collectives in the same order: look at what depends on the rank there"
    network = "look at the network and the devices between them: a link, a host that does not answer (NCCL_DEBUG=INFO)"
    match stand.kind:
        case "mismatch" if wait.differing:
            other = next(iter(wait.differing.values()))
            same = [rank for rank in (*wait.waiting, *wait.queued, *wait.over) if rank not in wait.differing]
            what = f"as number {wait.collective.seq} " if wait.ends is None else ""
            cause = f"mismatched collectives: {what}{name_ranks(sorted(same))} issued {wait.collective}, "
            alike = [rank for rank, one in wait.differing.items() if str(one) == str(other)]
            return f"{cause}{name_ranks(alike)} {other}", order
        case "mismatch":
            roots = (
                f"{name_ranks(wait.roots)} each take themselves for the root" if wait.roots else "no rank is the root"
            )
            return f"differing roots: in {wait} {roots}", "give all ranks the same src or dst, a global rank"
        case "missing" | "silent":
            absent = {*wait.missing, *wait.unknown}
            shown = [rank for rank in stand.culprits if rank in absent]
            rest = [rank for rank in stand.culprits if rank not in absent]
            if stand.kind == "silent" and not past:  # it is not known where these ranks are: they may be in it
                cause = f"{name_ranks(wait.waiting)} {waits} in {wait}, for {name_ranks(shown)}"
                cause += f"; other ranks wait for {name_ranks(rest)}" if rest else ""
            else:
                cause = f"{name_ranks(shown)} never came to {wait}, in which {name_ranks(wait.waiting)} {waits}"
                where = _verb(rest, "it is", "they are")
                cause += f"; nor did {name_ranks(rest)} come to where {where} waited for" if rest else ""
            behind = {rank for each in stand.others for rank in each.waiting} - {*wait.waiting, *stand.culprits}
            if behind:
                cause += f"; {name_ranks(sorted(behind))} {'waited' if past else _verb(behind, 'waits', 'wait')} behind"
            return cause, f"look at what {name_ranks(shown)} did then: stacks (py-spy dump), the end of the log"
        case "unreached":
            cause = (
                f"{who} issued {wait}, and {_verb(stand.culprits, 'its device has', 'their devices have')} not begun it"
            )
            return cause, f"look at what the device of {who} does before it: a kernel that does not end"
        case "left behind":
            return (
                f"{who} {_verb(stand.culprits, 'stands', 'stand')} in {wait}, which {name_ranks(wait.over)} completed",
                (f"look at the device and the link of {who}"),
            )
        case "unlisted":
            cause = f"all ranks that are known to be in the group are in {wait}; {who} may be missing"
            return cause, f"look at the stacks of {who}"
        case "circle":
            cause = f"{who} wait for each other, in opposite order: {_describe_circle(stand)}"
            return cause, order
        case _:
            lead, were = "all ranks", "were" if past else "are"
            if wait.ends is not None:
                lead, were = f"ranks {wait.ends[0]} and {wait.ends[1]}", f"{were} both"
            elif not wait.certain:
                lead, network = "all ranks that left a record", "get the records of all ranks"
            return f"{lead} {were} in {wait}, and it {'did' if past else 'does'} not come to its end", network


def _describe_circle(stand: Standstill) -> str:
    return ", ".join(f"rank {rank} in {wait}" for rank, wait in stand.circle[:SHOWN_RANKS])


def _describe_wait(wait: Wait, past: bool) -> str:
    # No record says how long it really waited.
    limit = f" (time-out {wait.collective.timeout:.0f} s)" if past and wait.collective.timeout else ""
    verb = "waited" if past else _verb(wait.waiting, "waits", "wait")
    absent = (*wait.missing, *wait.unknown)
    text = f"{name_ranks(wait.waiting)} {verb} in {wait}{limit}" + (f", for {name_ranks(absent)}" if absent else "")
    return (
        text
        + (f", behind an older one on {name_ranks(wait.behind)}" if wait.behind else "")
        + _format_place(wait.collective)
    )


def _format_place(one: Collective) -> str:
    return f", at {one.place}" if one.place else ""


@explains("CollectiveDesync", over_nodes=True)
def collective_desync(evidence: Evidence) -> Finding:
    """Find the collective that ranks issued differently, whether it is over or not."""
    flights = {number: rank.flight for number, rank in evidence.live.items() if rank.flight is not None}
    found = find_desync(flights, evidence.world_size)
    if found is None:
        return report_unknown("the ranks' flight records: they have gone on", command="TORCH_FR_BUFFER_SIZE=20000")
    facts = [
        f"rank {each} issued {one}" + _format_place(one) for each, one in list(found.differing.items())[:SHOWN_RANKS]
    ]
    cause, _ = _blame(Standstill("mismatch", (), "high", found), past=False)
    return name_nodes(Finding(cause, "high", evidence=tuple(facts)), found.differing, evidence.live)


def _is_elsewhere(rank: Rank) -> bool:
    """Return whether it is certain that a rank stands in no collective, whatever it left behind."""
    return rank.state in ("lost", "gone") or rank.stall.kind == Kind.HOLDING or _stands_in(rank, LOADER)


def _stands_in(rank: Rank, files: tuple[str, ...]) -> bool:
    main = training(rank.dump, rank.heartbeat.ident if rank.heartbeat is not None else 0)
    return main is not None and main.stands_in(files)


def _reason(number: int, ranks: Mapping[int, Rank], unasked: Mapping[int, str]) -> Reason:
    """Return what a rank does instead."""
    rank = ranks.get(number)
    if rank is None and number in unasked:
        remedy = f"look at that node: its daemon, its host, its link; `sentinel hang` there has rank {number}"
        return Reason(f"rank {number} is on {unasked[number]}", remedy, "medium")
    if rank is None:
        remedy = f"look at rank {number}'s own node: `sentinel hang` there"
        return Reason(f"rank {number} is {_locate_unseen(ranks)}", remedy, "medium")
    text, remedy, confidence = _tell(number, rank, ranks)
    return Reason(f"rank {number} {text}", remedy, confidence, _stack(rank))


def _tell(number: int, rank: Rank, ranks: Mapping[int, Rank]) -> tuple[str, str, Confidence]:
    if rank.state == "lost":
        return (
            "has died without a word",
            "look at its log and at the kernel's (dmesg): a crash, or the OOM killer",
            "high",
        )
    if rank.state == "gone":
        return _explain_exhausted(rank, ranks) or "has ended", UNEVEN, "high"
    main = training(rank.dump, rank.heartbeat.ident if rank.heartbeat is not None else 0)
    place = (main.users or main.frames[0]) if main is not None and main.frames else None
    at = f" at {place}" if place is not None else ""
    look = f"look at {place.file}, line {place.line}" if place is not None else f"look at rank {number}'s stacks"
    if rank.stall.kind == Kind.HOLDING:
        return f"holds the GIL{at}", f"{look}: one call into C that never returns, or waits", "high"
    if ended := _explain_exhausted(rank, ranks):
        return f"{ended}; it is{at or ' elsewhere'}", UNEVEN, "high"
    if rank.heartbeat is not None and rank.heartbeat.place == Place.LEFT:
        return f"has left the training loop; it is{at or ' elsewhere'}", look, "high"
    if rank.heartbeat is not None and rank.heartbeat.paused:
        return f"is in the phase {rank.phase!r}{at}", f"{look}: the other ranks do not know of that phase", "high"
    doing = f"{rank.stall.kind}" if rank.stall.kind else "is elsewhere"
    return f"{doing}{at}", f"{look}: the other ranks wait until that returns", "high" if place is not None else "medium"


def _explain_exhausted(rank: Rank, ranks: Mapping[int, Rank]) -> str:
    """Return words that say that a rank had fewer batches than others; empty where it had as many."""
    flight = rank.flight
    if flight is None or not flight.exhausted:
        return ""
    others = {n: each.flight.batches for n, each in ranks.items() if each is not rank and each.flight is not None}
    ahead = [n for n, batches in sorted(others.items()) if batches > flight.batches]
    if not ahead and any(batches >= 0 for batches in others.values()):
        return ""
    more = f" ({name_ranks(ahead)} had more)" if ahead else ""
    return f"came to the end of its loader, after {flight.batches} batches{more}"


def _stack(rank: Rank) -> tuple[str, ...]:
    main = training(rank.dump, rank.heartbeat.ident if rank.heartbeat else 0)
    return format_stack(main) if main is not None else ()


def format_stack(main: Thread) -> tuple[str, ...]:
    """Return a stack as facts of a case."""
    return tuple(f"  {'at' if index == 0 else 'by'} {frame}" for index, frame in enumerate(main.frames[:_FRAMES]))


def _verb(ranks: Collection[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
