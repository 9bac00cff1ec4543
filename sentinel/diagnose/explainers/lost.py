"""Explain how a rank died without a goodbye: by the kernel's record where the daemon asked for it in time, and by what
the rank was doing."""

from __future__ import annotations

import signal

from sentinel.diagnose.evidence import NOT_KNOWN, Confidence, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.runs import Rank
from sentinel.text import name_ranks

NEAR_LIMIT = 0.9
"""Resident memory over the limit of the machine or the cgroup, from which on the OOM killer is likely."""
_STATUS = "its exit status: the launcher's log has it (a signal is -9, or 137)"
_MEMORY = "give it more memory, or fewer loader workers; dmesg says `Out of memory: Killed process` if it was so"
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "it was killed: by the scheduler, the launcher, the OOM killer (dmesg) or a person",
    signal.SIGTERM: "it was ended: by the scheduler at its time limit, the launcher or a person",
    signal.SIGSEGV: "a crash in C: the end of its log, PYTHONFAULTHANDLER=1, dmesg; versions of extensions",
    signal.SIGBUS: "a file or shared memory was cut short under it: is /dev/shm full? (docker: --shm-size)",
    signal.SIGABRT: "C++ gave up: the end of its log says why (an assertion, an uncaught exception)",
    signal.SIGFPE: "a crash in C: an integer was divided by zero",
    signal.SIGILL: "a crash in C: built for another processor than this one",
}
"""Signal -> what it means and what to do."""


@explains("RankLost")
def rank_lost(evidence: Evidence) -> Finding:
    """Explain the first rank that died; the launcher ends the others soon after it."""
    dead = [rank for number in evidence.ranks if (rank := evidence.rank(number)) is not None]
    if not dead:
        return report_unknown("which process it was", _STATUS, command="sentinel last RUN")
    first = min(dead, key=_order)
    number = first.identity.rank
    furthest = max(rank.last_seq for rank in evidence.live.values())
    further = f" (other ranks step {evidence.step(furthest)})" if furthest > first.last_seq else ""
    facts = [
        f"rank {number}, process {first.identity.pid} on {first.identity.hostname}, reported step "
        f"{evidence.step(first.last_seq)} last{further}" + (f", in the phase {first.phase!r}" if first.phase else ""),
    ]
    if others := tuple(rank.identity.rank for rank in dead if rank is not first):
        facts.append(f"{name_ranks(others)} ended after it")
    share = _memory_share(evidence, first)
    if share is not None:
        facts.append(f"its resident memory was {share:.0%} of the limit")
    how, confidence, remedy = _how(first, near=share is not None and share > NEAR_LIMIT)
    missing = () if first.ending is not None and first.ending.status is not None else (_STATUS,)
    problem = "memory" if remedy is _MEMORY else ""
    return Finding(f"rank {number} {how}", confidence, remedy, missing, tuple(facts), problem=problem)


def _order(rank: Rank) -> tuple[float, int]:
    return rank.ending.time if rank.ending is not None else float("inf"), rank.last_seq


def _how(rank: Rank, *, near: bool) -> tuple[str, Confidence, str]:
    """Return what happened, how certain that is, and what to do."""
    ending = rank.ending
    status = ending.status if ending is not None else None
    if ending is not None and ending.oom and status in (None, -signal.SIGKILL):
        return "was killed by the kernel for want of memory (its cgroup counts an oom_kill)", "high", _MEMORY
    if near and status in (None, -signal.SIGKILL):
        return "died, at the limit of memory" + (", by SIGKILL" if status else ""), "medium", _MEMORY
    if status is None:
        return f"died; of what is {NOT_KNOWN}", "low", ""
    if status < 0:
        return f"was ended by {_name(-status)}", "high", _SIGNALS.get(-status, "")
    remedy = "look for os._exit and for libraries that call exit(); an exception would have said goodbye"
    return f"ended itself with exit status {status}, and no goodbye", "high", remedy


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _memory_share(evidence: Evidence, rank: Rank) -> float | None:
    """Return resident memory over the limit, when it was read last; None where either is not known."""
    limit = rank.hello.facts.get("memory_limit_bytes")
    used = evidence.series("rss_bytes", rank.identity.rank)
    return used[-1][1] / limit if used and isinstance(limit, int) and limit > 0 else None
