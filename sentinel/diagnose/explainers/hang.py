"""Explain why a rank makes no progress: from its stacks, and from the training thread's use of the processor."""

from __future__ import annotations

from collections.abc import Sequence

from sentinel.diagnose.evidence import Confidence, Evidence, Finding, report_unknown
from sentinel.diagnose.explainers.ranks import across, format_stack, name_nodes
from sentinel.diagnose.explanations import explains
from sentinel.diagnose.standstill.stacks import COLLECTIVES, LOADER, StackFrame, Thread, training
from sentinel.runs import Rank
from sentinel.text import name_ranks
from sentinel.wire.heartbeat_page import Kind, Work

_LAST = {
    Work.STEP: "an optimizer step",
    Work.BATCH: "a batch from the loader",
    Work.FORWARD: "a forward pass",
    Work.BACKWARD: "a backward pass",
    Work.LOG: "monitor.log",
}
_COLLECTIVE = "waits in a collective for other ranks"
_WAITS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        LOADER,
        "waits for a batch of its DataLoader, whose workers do not deliver",
        "look at what the workers do (a lock that was held at the fork, a file system that does not answer); "
        "DataLoader(timeout=...) makes an error of it",
    ),
    (
        COLLECTIVES,
        _COLLECTIVE,
        "look at the other ranks' stacks: the one that is not in this collective is the cause",
    ),
    (
        ("/threading.py", "/queue.py", "multiprocessing/synchronize.py", "multiprocessing/connection.py"),
        "waits for a lock, a queue or another process",
        "look for who should release it: the other threads' stacks are in the case",
    ),
    (
        ("/socket.py", "/ssl.py", "http/client.py", "urllib3/", "httpx"),
        "waits for the network",
        "give the request a time-out, and take it out of the training loop",
    ),
)
"""Files of a library on the stack -> what the thread does -> what to do."""


@explains("Hang", over_nodes=True)
def hang(evidence: Evidence) -> Finding:
    """Compare where the ranks stand with each other, if they do; else explain the first rank that stalls, and where."""
    if (between := across(evidence.live, evidence.unasked)) is not None:
        return between
    ranks = [evidence.rank(number) for number in evidence.ranks]
    stalled = next((rank for rank in ranks if rank is not None), None)
    if stalled is None:
        return report_unknown("its stacks: the rank is gone", command="sentinel hang /tmp/nccl_trace_rank_* LOG")
    return name_nodes(_explain_rank(stalled, evidence), [stalled.identity.rank], evidence.live)


def _explain_rank(stalled: Rank, evidence: Evidence) -> Finding:
    """Explain what one rank does, by its own stacks."""
    facts = _facts(stalled)
    main = training(stalled.dump, training_ident(stalled))
    if main is None or not main.frames:
        missing = ("its stacks: the process did not give them (py-spy dump --pid does, from outside)",)
        return Finding(f"rank {stalled.identity.rank} {stalled.stall.kind}", "low", missing=missing, evidence=facts)
    place = main.users or main.frames[0]
    cause, remedy, confidence = _explain_standstill(stalled.stall.kind, main, place)
    silent = _silent(evidence)
    if silent and confidence == "high":
        confidence = "medium"
    return Finding(
        f"rank {stalled.identity.rank} {cause}, at {place}", confidence, remedy, silent, (*facts, *format_stack(main))
    )


def _silent(evidence: Evidence) -> tuple[str, ...]:
    """Return words for the ranks whose collectives are not known: this rank may wait for one of them."""
    live = [rank for rank in evidence.live.values() if rank.state == "live" and rank.identity.world_size > 1]
    silent = [rank.identity.rank for rank in live if rank.flight is None]
    return (f"what {name_ranks(silent)} did in collectives: no answer yet",) if silent else ()


def training_ident(rank: Rank) -> int:
    """Return the id of the training thread in a dump; 0: not known."""
    return rank.heartbeat.ident if rank.heartbeat is not None else 0


def _explain_standstill(kind: Kind, main: Thread, place: StackFrame) -> tuple[str, str, Confidence]:
    look = f"look at {place.file}, line {place.line}"
    if kind == Kind.HOLDING:
        return "holds the GIL and comes to no end", f"{look}: one call into C that never returns, or waits", "high"
    if kind == Kind.BUSY:
        return "computes without end", f"{look}: a loop there does not end, or takes very long", "medium"
    if kind == Kind.STARTING:
        remedy = f"{look}; a first collective waits for ranks to join"
        return "has not come through its first two steps", remedy, "medium"
    for files, cause, remedy in _WAITS:
        if main.stands_in(files):
            return cause, remedy, "high" if cause != _COLLECTIVE else "medium"
    if any(frame.function == "_engine_run_backward" for frame in _inner(main)):
        remedy = "look at the collectives that its hooks issue: DDP reduces there"
        return "waits inside a backward pass", remedy, "medium"
    if any(LOADER[0] in frame.file for frame in main.frames):
        return "waits for the dataset of a DataLoader", f"{look}: the dataset does not return", "high"
    return f"{kind or 'stands still'}", f"{look}: nothing else moves until that returns", "medium"


def _inner(main: Thread) -> Sequence[StackFrame]:
    """Return the innermost frames up to the first of the user's."""
    own = next((index for index, frame in enumerate(main.frames) if frame.users), len(main.frames))
    return main.frames[:own]


def _facts(rank: Rank) -> tuple[str, ...]:
    stall, beat = rank.stall, rank.heartbeat
    facts = [f"no progress for {stall.quiet:.0f} s"]
    if beat is not None and beat.work in _LAST:
        facts[0] += f"; the last was {_LAST[Work(beat.work)]}"
    if stall.kind:
        facts.append(f"the thread that trains {stall.kind}")
    if beat is not None and beat.longest:
        facts.append(f"it never stood still for longer than {beat.longest:.2g} s before, in {beat.steps} steps")
    return tuple(facts)
