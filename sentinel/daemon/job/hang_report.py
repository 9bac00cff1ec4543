"""Where the ranks are at this moment, for `sentinel hang`: what they have answered, and whether all have."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.diagnose.explainers.hang import hang, training_ident
from sentinel.diagnose.standstill.stacks import training
from sentinel.runs import Rank, Run
from sentinel.runs.steps import RunStep

STANDS_SECONDS = 2.0
"""Seconds without progress from which a rank is said to stand still."""


def begin_survey(watches: Iterable[WatchedRun], now: float) -> None:
    """Ask all ranks where they are; most answer within milliseconds."""
    for watch in watches:
        watch.ingest.stalls.survey(now)


def collect_survey(watches: Iterable[WatchedRun]) -> list[dict[str, Any]]:
    """Return one entry per run; `answered` says whether all of its ranks have answered."""
    return [
        describe(watch.run, watch.run.attempt.ranks, watch.run.attempt.last_seq)
        | {"answered": watch.ingest.stalls.surveyed, "not_asked": []}
        for watch in watches
    ]


def describe(
    run: Run, ranks: Mapping[int, Rank], seq: int, unasked: Mapping[int, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return where ranks of this node, or of all nodes, stand, and why.

    `seq`: the last step that one of them reported. `unasked`: as in `Evidence`.
    """
    found = _explain(ranks, seq, unasked)
    return {
        "run": run.name,
        "run_id": run.run_id,
        "ranks": [_rank(ranks[number]) for number in sorted(ranks)],
        "cause": found.cause,
        "confidence": found.confidence,
        "evidence": list(found.evidence),
        "remedy": found.remedy,
        "missing": list(found.missing),
        "command": found.command,
    }


def _explain(ranks: Mapping[int, Rank], seq: int, unasked: Mapping[int, str]) -> Finding:
    stalled = [number for number, rank in ranks.items() if rank.stall.seconds > STANDS_SECONDS]
    if not stalled:
        return Finding("", "none")
    last = RunStep(-1, time.time(), {}, {})
    return hang(Evidence(since=seq, until=seq, last=last, ranks=sorted(stalled), live=ranks, unasked=unasked))


def _rank(rank: Rank) -> dict[str, Any]:
    main = training(rank.dump, training_ident(rank))
    place = (main.users or main.frames[0]) if main is not None and main.frames else None
    return {
        "rank": rank.identity.rank,
        "node": rank.identity.node,
        "hostname": rank.identity.hostname,
        "pid": rank.identity.pid,
        "state": rank.state,
        "phase": rank.phase,
        "step": rank.last_seq + rank.hello.step_offset,
        "quiet_seconds": rank.stall.quiet,
        "kind": str(rank.stall.kind) if rank.stall.seconds > STANDS_SECONDS else "",
        "at": str(place) if place is not None else "",
    }
