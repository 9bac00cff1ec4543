"""Finds which rank of a job failed first, from logs alone.

What launchers say of exits counts most, then the ranks' own exceptions. A rank that only stopped waiting for another
one is never named. If there are only such ranks, the cause is not known, and the finding says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sentinel.diagnose.evidence import NOT_KNOWN, Confidence, Finding
from sentinel.text import name_ranks
from sentinel.toolkit.postmortem.launchers import Exit
from sentinel.toolkit.postmortem.words import Failure, JobLog, Said

_SHOWN = 8
_FLIGHTS = "who was in which collective: flight-recorder dumps (TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
_SIGNALS = {
    9: "memory of the host is the usual reason: `dmesg | grep -i oom` on its node, or who else sends SIGKILL "
    "(a scheduler, a liveness probe)",
    11: "a crash in native code: run with PYTHONFAULTHANDLER=1, which prints the stack",
    7: "shared memory (/dev/shm) or a mapped file ran out: a larger --shm-size, fewer DataLoader workers",
    6: "native code gave up: its last lines on stderr say why; PYTHONFAULTHANDLER=1 prints the stack",
}


class Failed(msgspec.Struct, frozen=True):
    """A rank, or a process of an unknown rank, that failed by itself."""

    rank: int | None
    who: str
    failure: Failure | None = None
    exit: Exit | None = None
    said_first: bool = False
    """Whether its launcher says that it was the first."""

    @property
    def order(self) -> tuple[bool, str, float, int]:
        """The key by which the first failure sorts first: named by a launcher, then by time if known, then by line."""
        time = self.failure.time if self.failure is not None else 0.0
        line = self.failure.order if self.failure is not None else self.exit.order if self.exit is not None else 0
        return not self.said_first, self.exit.time if self.said_first and self.exit else "", time, line

    def __str__(self) -> str:
        if self.failure is None:
            return f"{self.who}: it {self.exit}" + (f": {self.exit.error}" if self.exit and self.exit.error else "")
        return f"{self.who}: {self.failure}"

    @property
    def brief(self) -> str:
        """What happened, in one sentence."""
        if self.failure is None:
            return f"it {self.exit}" + (f": {self.exit.error[:300]}" if self.exit and self.exit.error else "")
        return self.failure.brief


def explain_first_failure(log: JobLog) -> Finding:
    """Return the first failure, or that it is not known, and why."""
    if (mismatch := _mismatch(log)) is not None:
        return mismatch
    failed = sorted(_list_failed(log), key=lambda one: one.order)
    if failed:
        return _explain(failed, log)
    if log.job:
        return Finding(f"the scheduler ended the job: {log.job}", "high", "nothing in the logs failed before")
    return _not_known(log)


def _list_failed(log: JobLog) -> Iterable[Failed]:
    """Yield the ranks and processes that failed by themselves."""
    exits = _exits(log)
    for rank, one in exits.items():
        own = [] if rank not in log.said else log.said[rank].failures
        primary = [failure for failure in own if not failure.secondary]
        shown = _find_unplaced(log, one) if not own else None
        if one.by_launcher or not one.status:
            continue
        if primary:
            yield Failed(rank, f"rank {rank}", primary[0], one, one.first)
        elif shown is not None:
            yield Failed(rank, f"rank {rank}", shown, one, one.first)
        elif not own and not (rank in log.noticed or Failure(one.error).secondary or _has_aborted_waiting(log, one)):
            yield Failed(rank, f"rank {rank}", None, one, one.first)
    for rank, said in log.said.items():
        primary = [failure for failure in said.failures if not failure.secondary]
        if primary and (rank not in exits or exits[rank].by_launcher or not exits[rank].status):
            yield Failed(rank, f"rank {rank}", primary[0], exits.get(rank))
    told = {failure.error for said in log.said.values() for failure in said.failures}
    for source, failure in log.unplaced:
        if not failure.secondary and failure.error not in told:
            yield Failed(None, f"a process whose rank is not said{f' ({source})' if source else ''}", failure)
    for one in log.exits:
        if one.rank is None and one.status not in (0, 1) and not one.by_launcher:
            yield Failed(None, f"a process whose rank {one.launcher} does not say", None, one)


def _exits(log: JobLog) -> dict[int, Exit]:
    """Return exits by rank. A footer's root cause is preferred to another launcher's line on the same rank."""
    found: dict[int, Exit] = {}
    for one in sorted(log.exits, key=lambda one: (not one.first, one.time, one.order)):
        if one.rank is not None:
            found.setdefault(one.rank, one)
    return found


def _find_unplaced(log: JobLog, one: Exit) -> Failure | None:
    """Return the only exception without a rank, if it can be this rank's: older torch writes no rank before lines."""
    alike = [failure for _, failure in log.unplaced if not failure.secondary]
    return alike[0] if one.first and len({failure.error for failure in alike}) == 1 else None


def _has_aborted_waiting(log: JobLog, one: Exit) -> bool:
    """Whether a rank probably aborted because it gave up waiting: it got SIGABRT, and some process says so."""
    return one.status in (-6, 1, 134) and any(failure.secondary for _, failure in log.unplaced)


def _explain(failed: list[Failed], log: JobLog) -> Finding:
    first, *others = failed
    alike = [one for one in others if _same(one, first)]
    sure = _confidence(first, others, alike, log)
    facts = [str(first)]
    if first.exit is not None and first.exit.rank is not None:
        says = "was the first to fail" if first.said_first else "failed"
        facts.append(f"{first.exit.launcher}: rank {first.exit.rank} {says}; it {first.exit}")
    ranks = sorted({one.rank for one in (first, *alike) if one.rank is not None})
    if len(ranks) > 1:
        facts.append(f"{name_ranks(ranks)} failed alike: what they have in common is the cause, and not one of them")
    facts += [str(one) for one in others if one not in alike][: _SHOWN - len(facts)]
    before = [(key, failure) for key, failure in log.earlier if not failure.secondary]
    for key, failure in before[-1:]:
        who = f"rank {key}" if isinstance(key, int) else "a process whose rank is not said"
        facts.append(f"an earlier attempt, before torchrun started the ranks again: {who}: {failure}")
    victims = sorted(rank for rank in log.said if rank not in ranks and _only_secondary(log, rank))
    if victims:
        facts.append(f"{name_ranks(victims)} failed after that: they waited for another rank")
    missing = (
        () if first.rank is not None else ("its rank: print it before each line (torchrun --tee 3, srun --label)",)
    )
    cause = f"the first to fail was {first.who}: {first.brief}"
    if log.job:
        missing = (*missing, f"whether it failed by itself: the scheduler ended the job ({log.job})")
    return Finding(cause, sure, find_remedy(first.failure, first.exit, log), missing, tuple(facts))


def _confidence(first: Failed, others: list[Failed], alike: list[Failed], log: JobLog) -> Confidence:
    """Return the confidence: high if a launcher names the rank, which has an exception of its own or was ended by a
    signal, and no other failed differently."""
    if first.rank is None or log.job:
        return "low"
    alone = len(others) == len(alike)
    placed = first.failure is None or first.failure in log.said.get(first.rank, Said()).failures
    if first.said_first and alone and placed:
        return "high"
    return "medium" if alone or first.said_first else "low"


def _same(one: Failed, other: Failed) -> bool:
    if one.failure is None or other.failure is None:
        return (
            one.failure is other.failure
            and one.exit is not None
            and other.exit is not None
            and (one.exit.status == other.exit.status)
        )
    return one.failure.error[:80] == other.failure.error[:80]


def _only_secondary(log: JobLog, rank: int) -> bool:
    failures = log.said[rank].failures
    return bool(failures) and all(failure.secondary for failure in failures)


def _mismatch(log: JobLog) -> Finding | None:
    """Return mismatched collectives: TORCH_DISTRIBUTED_DEBUG=DETAIL names both ranks; gloo's sizes name none."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for rank, one in sorted(log.fingerprints.items()):
        kinds.setdefault((one.op, one.shape), []).append(rank)
    remedy = "all ranks must issue the same collectives in the same order: look at what depends on the rank there"
    if len(kinds) > 1:
        parts = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
        seq = next((one.seq for one in log.fingerprints.values() if one.seq), "")
        words = ", ".join(f"{name_ranks(ranks)} issued {log.fingerprints[ranks[0]]}" for ranks in parts)
        cause = f"mismatched collectives: {f'as number {seq} ' if seq else ''}{words}"
        return Finding(cause, "high", remedy, evidence=tuple(_places(log)))
    if log.sizes is not None:
        received, expected = log.sizes
        cause = f"mismatched collectives: a rank received {received} bytes where it expected {expected}"
        lacking = ("which rank issued what: TORCH_DISTRIBUTED_DEBUG=DETAIL, or flight-recorder dumps, say it",)
        return Finding(cause, "medium", remedy, lacking, tuple(_places(log)))
    return None


def _places(log: JobLog) -> list[str]:
    return [f"rank {rank}: at {said.failures[0].place}" for rank, said in sorted(log.said.items()) if said.failures][
        :_SHOWN
    ]


def _not_known(log: JobLog) -> Finding:
    """Return what can be said if ranks only stopped waiting, or nothing is known."""
    waited = sorted(rank for rank in log.said if log.said[rank].failures or log.said[rank].flight)
    facts = [f"rank {rank}: {log.said[rank].failures[0]}" for rank in waited[:_SHOWN] if log.said[rank].failures]
    if log.barrier:
        late = sorted(log.barrier)
        cause = f"{name_ranks(late)} never came to the monitored barrier"
        remedy = f"look at what {name_ranks(late)} did then: stacks (py-spy dump), the end of the log"
        return Finding(cause, "medium", remedy, ("why: no exception of theirs is here",), tuple(facts))
    exits = _exits(log)
    idle = sorted(rank for rank, one in exits.items() if one.by_launcher and rank not in log.said)
    timed_out = [rank for rank in waited if any(failure.waited for failure in log.said[rank].failures)]
    if idle and timed_out:
        cause = f"{name_ranks(idle)} did not come to where {name_ranks(timed_out)} waited"
        facts += [f"{exits[rank].launcher}: rank {rank} was still running, and was ended last" for rank in idle[:3]]
        remedy = f"look at what {name_ranks(idle)} did then: stacks (py-spy dump), the end of the log"
        return Finding(cause, "low", remedy, ("why: no exception of theirs is here", _FLIGHTS), tuple(facts))
    missing = [_FLIGHTS]
    if waited:
        quiet = sorted(log.ranks.difference(waited))
        others = f"; {name_ranks(quiet)} left no exception" if quiet else ", of which nothing is here"
        missing.insert(0, f"who failed first: {name_ranks(waited)} only waited for another rank{others}")
    elif exits:
        said = ", ".join(f"rank {rank} {one}" for rank, one in list(exits.items())[:_SHOWN])
        missing.insert(0, f"why: no exception is here, only exits ({said})")
    elif log.unplaced:
        missing.insert(0, "who failed first: the exceptions that are here only waited for another rank")
    if log.out_of_memory:
        facts.append("slurmstepd: the kernel ended processes because memory ran out")
    return Finding(NOT_KNOWN, "none", "", tuple(missing), tuple(facts))


def find_remedy(failure: Failure | None, exited: Exit | None = None, log: JobLog | None = None) -> str:
    """Return what to do about a failure."""
    if failure is None:
        number = 0 if exited is None else -exited.status if exited.status < 0 else max(exited.status - 128, 0)
        if number == 9 and log is not None and log.out_of_memory:
            return "memory of the host ran out: ask for more (--mem), fewer DataLoader workers, smaller caches"
        return _SIGNALS.get(number, "look at the last lines of that rank's log")
    error = failure.error
    at = f" at {failure.place}" if failure.place and not failure.library else ""
    if "DataLoader worker" in error and ("killed by signal" in error or "exited unexpectedly" in error):
        reason = "shared memory ran out: a larger --shm-size" if "Bus" in error else "memory of the host ran out"
        return (
            f"{reason}: fewer num_workers or a smaller prefetch_factor of the DataLoader{at}; num_workers=0 shows more"
        )
    ends = "an exception in a thread ends the thread alone: hand it to the one that trains, so that the rank ends"
    if "out of memory" in error.lower():
        more = f"; {ends}" if failure.thread else ""
        return f"there was not enough device memory: `sentinel memory` shows whose it is in a snapshot{more}"
    if failure.thread:
        return ends
    return f"fix what failed{at}" if at else ""
