"""The outcome of a run in one row: of a live run from its daemon's status, of an ended one from its history."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from sentinel.diagnose import folding
from sentinel.store import History
from sentinel.store.retention import StoredHistory
from sentinel.supervise.telling import ending, signal_name
from sentinel.text import UNRESOLVED, describe_incidents, format_clock, format_duration, name_lost_steps, name_worst

LOSS_STEPS = 64
"""Last steps of a run in which its loss is searched."""
FAILED = "failed"
_OF_THE_END = ("hello", "goodbye", "lost", "process ended", "command ended", "end wanted")
"""Kinds of events by which the end of a run is known."""
_SUPERVISOR = -1
"""Stands for `sentinel run` among the ranks' numbers."""


class _Ended(msgspec.Struct):
    """The required fields of the event of a process that ended."""

    status: int


class _Wanted(msgspec.Struct):
    """The required fields of the event of an announced end."""

    signal: int = 0
    why: str = ""
    """Why `sentinel run` itself ended the run; empty: it passed a signal on."""
    left_out: bool = False
    """Whether that was because the job goes on without this node."""


class RunOutcome(NamedTuple):
    state: str
    """`running`, `stalled`, `ended`, `stopped`, `failed` or `unknown`."""
    words: str
    status: int | None = None
    """The exit status as in `subprocess`, a signal negative; None: unknown."""
    is_supervisors: bool = False
    """Whether `sentinel run` ended it: the status is that of its signal."""


def describe_run(
    kept: History, stored: StoredHistory, cases: Sequence[dict[str, Any]], live: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a row of `sentinel last --json`. `live`: the run in a daemon's status, if a daemon watches it."""
    attempts = kept.attempts()
    number = attempts[-1][0] if attempts else 0
    began, seconds = kept.lifetime(over=live is None)
    seq = kept.last_seq(number)
    step, loss = (seq + kept.step_offset(number) if seq >= 0 else None), _find_loss(kept, number, seq)
    outcome = find_outcome(kept, number, cases) if live is None else _describe_live(live)
    if live is not None:
        began, seconds = _measure_live(live) or (began, seconds)
        step, loss = live["step"] if live["step"] >= 0 else None, live["values"].get("loss", loss)
    return {
        "run": kept.run, "run_id": kept.run_id, "state": outcome.state, "outcome": outcome.words,
        "status": outcome.status, "began": began or None,
        "seconds": seconds if began else None, "attempts": len(attempts), "step": step, "loss": loss,
        "incidents": dict(Counter(case["severity"] for case in cases)),
        "open": sum(case["state"] in ("firing", UNRESOLVED) for case in cases),
        "worst": _find_worst(cases) if cases else None,
        "node": None if any("own" in case for case in cases) else kept.node,
        "snapshot": _find_snapshot(kept, number), "lost_steps": _count_lost(kept), "file": str(stored.path),
    }  # fmt: skip


def _find_worst(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first incident of the worst problem, with the problem's severity; `grew` in it: its own is less."""
    worst = folding.find_worst(list_severities(cases))
    origin = next(case for case in cases if case["id"] == worst.id)
    own = {key: origin[key] for key in ("id", "alert", "state", "step")}
    return own | {"severity": worst.severity, "grew": origin["severity"] != worst.severity}


def list_severities(cases: Iterable[Mapping[str, Any]]) -> Iterator[folding.IncidentSeverity]:
    """Return the severities of a history's incidents; those stored before there were problems have no parent."""
    return (folding.IncidentSeverity(case["id"], case.get("parent", ""), case["severity"]) for case in cases)


def list_going_on(runs: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by id the runs of which a rank may still take a step: a daemon stays for a moment after the last step."""
    return {run["run_id"]: run for run in runs if any(rank["state"] != "gone" for rank in run["ranks"])}


def _find_loss(kept: History, attempt: int, last: int) -> float | None:
    found = [step.run["loss"] for step in kept.steps(attempt=attempt, after=last - LOSS_STEPS) if "loss" in step.run]
    return found[-1] if found else None


def _find_snapshot(kept: History, attempt: int) -> int | None:
    """Return the user's step of the newest snapshot on disk that no rollback discarded."""
    newest: int | None = None
    for event in kept.events("snapshot on disk", "rollback"):
        if event.attempt != attempt:
            continue
        if event.kind == "snapshot on disk":
            newest = event.seq
        elif event.kind == "rollback" and event.detail.get("ok") and newest is not None and newest > event.detail["to"]:
            newest = None
    return newest + kept.step_offset(attempt) if newest is not None else None


def _count_lost(kept: History) -> int:
    """Return the most steps that the history lacks, as it could not be written for too long, on a full disk, say."""
    return sum(event.detail.get("dropped", {}).get("steps", 0) for event in kept.events("history gap"))


def _describe_live(live: dict[str, Any]) -> RunOutcome:
    standing = max((rank["stall"]["seconds"] for rank in live["ranks"] if rank["state"] == "stalled"), default=None)
    if standing is not None:
        return RunOutcome("stalled", f"stalled for {format_duration(standing)}")
    return RunOutcome("running", "running")


def find_outcome(kept: History, attempt: int, cases: Sequence[dict[str, Any]]) -> RunOutcome:
    """Return the outcome of a run that is no longer watched, from the ends that its ranks reported and other events."""
    ends, wanted = dict[int, dict[str, Any]](), 0
    statuses, of_command = dict[int, int](), None
    for event in kept.events(*_OF_THE_END):
        if event.attempt != attempt:
            continue
        rank = event.detail.get("rank", 0)
        if event.kind == "hello":
            ends.pop(rank, None)
            statuses.pop(rank, None)
        elif event.kind in ("goodbye", "lost"):
            ends[rank] = event.detail | {"kind": event.kind}
        elif event.kind == "process ended":
            statuses[rank] = msgspec.convert(event.detail, _Ended).status
        elif event.kind == "command ended":
            of_command = msgspec.convert(event.detail, _Ended).status
        elif event.kind == "end wanted":
            announced = msgspec.convert(event.detail, _Wanted)
            if announced.why:
                ends[_SUPERVISOR] = {"kind": event.kind, "why": announced.why, "left_out": announced.left_out}
            else:
                wanted = announced.signal
    ranks = len(kept.ranks(attempt))
    status = of_command if of_command is not None else _combine_statuses(statuses, ranks)
    lost = [case["diagnosis"]["cause"] for case in cases if case["alert"] == "RankLost"]
    asked = RunOutcome("ended", f"ended by {named}") if (named := signal_name(-wanted)) else None
    outcome = _judge_ends(ends, ranks, status, asked, lost[-1] if lost else "")
    said = outcome.state == "ended" or outcome.is_supervisors or (lost and status in statuses.values())
    words = outcome.words if status is None or said else f"{outcome.words} ({ending(status)})"
    return outcome._replace(words=words, status=status)


def _combine_statuses(statuses: dict[int, int], ranks: int) -> int | None:
    """Return the first exit status, in order of time, that is not 0; 0 if all ranks have it, otherwise None."""
    return next(filter(None, statuses.values()), 0 if len(statuses) == ranks > 0 else None)


def _judge_ends(
    ends: dict[int, dict[str, Any]], ranks: int, status: int | None, asked: RunOutcome | None, lost: str
) -> RunOutcome:
    """`ends`: by rank, in order of time, that by `sentinel run` among them. `asked`: the outcome by the signal from
    outside that was to end the run, if there was one. `lost`: why a rank was, as its alert says."""
    if (supervisor := ends.get(_SUPERVISOR)) is not None and supervisor["left_out"]:
        return RunOutcome("stopped", supervisor["why"], is_supervisors=True)
    for end in ends.values():  # the others may have ended because of the first
        if end["kind"] == "end wanted":
            return RunOutcome(FAILED, f"ended by sentinel run: {end['why']}", is_supervisors=True)
        if end["kind"] == "lost":
            return asked or RunOutcome(FAILED, f"failed: {lost or 'its connection was lost'}")
        if end.get("detail") == "KeyboardInterrupt":
            return asked or RunOutcome("ended", "ended by KeyboardInterrupt")
        if end["reason"] == "exception":
            return RunOutcome(FAILED, f"failed: {end.get('detail') or 'an exception'}")
        if end["reason"] == "stopped":
            return RunOutcome("stopped", f"stopped by Sentinel: {end.get('detail', '')}".rstrip(": "))
    if status and asked is not None:
        return asked
    if len(ends) == ranks > 0:
        return RunOutcome(FAILED, "failed") if status else RunOutcome("ended", "ended")
    return RunOutcome("unknown", "not known: its history lacks its end")


def describe_found(row: dict[str, Any]) -> str:
    """Return the incidents of a run in words, and what its history lacks. In a job over several nodes `node` of the row
    is the one whose incidents they are; None: the job's."""
    worst = row["worst"]
    named = name_worst(worst["alert"], worst["step"], grew=worst["grew"]) if worst else ""
    found = describe_incidents(row["incidents"], named) + (f" on node {row['node']}" if row["node"] is not None else "")
    return found + (f"; {name_lost_steps(row['lost_steps'])}" if row["lost_steps"] else "")


def name_start(row: dict[str, Any]) -> str:
    return "-" if row["began"] is None else format_clock(row["began"])


def name_took(row: dict[str, Any]) -> str:
    return format_duration(row["seconds"]) if row["seconds"] is not None else "-"


def _measure_live(live: dict[str, Any]) -> tuple[float, float] | None:
    """Return when a live run began, and the seconds since: its history may lack that. None: its daemon, of an earlier
    version, does not say it."""
    began = live.get("began")
    return (began, max(time.time() - began, 0.0)) if began else None


def describe_unkept(live: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a live run without a history, from what its daemon says now."""
    outcome = _describe_live(live)
    began, seconds = _measure_live(live) or (None, None)
    return {
        "run": live["run"], "run_id": live["run_id"], "state": outcome.state, "outcome": outcome.words, "status": None,
        "began": began, "seconds": seconds, "attempts": live["attempt"] + 1,
        "step": live["step"] if live["step"] >= 0 else None, "loss": live["values"].get("loss"), "incidents": {},
        "open": live["open_incidents"], "worst": None, "node": None, "snapshot": None, "lost_steps": 0, "file": "",
    }  # fmt: skip
