"""What a live daemon reports of itself: plain dicts for the command line and HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from sentinel._version import __version__
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose.standstill.stacks import find_place
from sentinel.runs import Attempt, Rank
from sentinel.runs.devices import Gpu


def status(watches: Iterable[WatchedRun]) -> dict[str, Any]:
    """Return the state of the daemon and its runs."""
    return {"version": __version__, "pid": os.getpid(), "runs": [_run(watch) for watch in watches]}


def incidents(watches: Iterable[WatchedRun]) -> list[dict[str, Any]]:
    """Return the cases in memory of all these runs, for each run in the order in which they fired."""
    return [case.builtins() for watch in watches for case in watch.incidents.log.cases.values()]


def _run(watch: WatchedRun) -> dict[str, Any]:
    attempt, age = watch.run.attempt, watch.actions.snapshot_age
    newest_good = age.newest_good if age is not None else None
    return {
        "run": watch.run.name,
        "run_id": watch.run.run_id,
        "attempt": attempt.number,
        "began": watch.run.began,
        "step": attempt.last_seq + attempt.step_offset,
        "judged_as": attempt.facts.get("judged_as", ""),
        "values": attempt.present(),
        "ranks": [_rank(rank, attempt.silent()) for _, rank in sorted(attempt.ranks.items())],
        "gpus": _gpus(attempt),
        "host": attempt.devices.read_node(watch.run.run_id),
        "rules": [msgspec.to_builtins(rule) for rule in watch.incidents.evaluator.status()],
        "opening": _opening(watch),
        "open_incidents": sum(case.state == "firing" for case in watch.incidents.log.cases.values()),
        "incidents": watch.incidents.log.fired.total(),
        "rollback": {
            "armed": any(rank.hello.rollback for rank in attempt.live),
            "phase": watch.actions.rollback.phase,
            "done": [msgspec.to_builtins(outcome) for outcome in watch.actions.rollback.done],
            "held": sorted({seq + attempt.step_offset for rank in attempt.live for seq in rank.snapshots}),
            "newest_good": newest_good + attempt.step_offset if newest_good is not None else None,
            "age_steps": age.steps if age is not None else None,
            "withheld_by": list(attempt.withheld_by),
            "disk": _disk(watch),
        },
        "job": watch.membership.status() if watch.membership else None,
        "silences": [msgspec.to_builtins(s) for s in watch.notifier.silences.of_run(watch.run.name, watch.run.run_id)],
        "notifications": watch.notifier.pipeline.status(),
        "notifications_trouble": watch.notifier.pipeline.trouble,
        "history": str(watch.store.path) if watch.store else "",
        "history_dropped": dict(watch.store.dropped) if watch.store else {},
        "trouble": watch.store.trouble if watch.store else "no history is kept",
    }


def _disk(watch: WatchedRun) -> dict[str, Any] | None:
    """Return what is known of the parts of snapshots that a job's nodes write; None: its ranks write none."""
    disk, where = watch.actions.publishing.disk, watch.run.attempt.facts.get("parts_in", "")
    if disk is None or not where:
        return None
    return {"where": where, "newest": max(disk.kept, default=None), "newest_on_all": max(disk.on_all, default=None)}


def _opening(watch: WatchedRun) -> dict[str, Any] | None:
    """Return the opening report; None until the opening is over."""
    report = watch.incidents.opening
    return msgspec.to_builtins(report) | {"text": report.text} if report is not None else None


def _gpus(attempt: Attempt) -> dict[str, Any]:
    """Return the GPUs that the run trains on; `trouble` says why they are not read."""
    devices = attempt.devices
    on: dict[str, tuple[Gpu, list[int]]] = {}
    for rank in attempt.live:
        for gpu in devices.find_gpus(rank.hello.gpus):
            on.setdefault(gpu.uuid, (gpu, []))[1].append(rank.identity.rank)
    return {
        "trouble": devices.trouble if any(rank.hello.gpus for rank in attempt.live) else "",
        "devices": [
            {
                "gpu": gpu.index,
                "uuid": uuid,
                "model": gpu.model,
                "ranks": ranks,
                "values": dict(gpu.values),
                "faults": [msgspec.to_builtins(fault) for fault in gpu.faults],
            }
            for uuid, (gpu, ranks) in on.items()
        ],
    }


def _state(rank: Rank, silent: frozenset[int]) -> str:
    """Return a rank's state in a word. `silent`: ranks that the others wait for."""
    if rank.state != "live":
        return rank.state
    return "stalled" if rank.standing else "silent" if rank.identity.rank in silent else "live"


def _rank(rank: Rank, silent: frozenset[int]) -> dict[str, Any]:
    return {
        "rank": rank.identity.rank,
        "node": rank.identity.node,
        "pid": rank.identity.pid,
        "hostname": rank.identity.hostname,
        "state": _state(rank, silent),
        "phase": rank.phase,
        "step": rank.last_seq + rank.hello.step_offset,
        "heard_seconds": round(time.monotonic() - rank.heard, 3),
        "dropped": rank.dropped,
        "skipped": rank.skipped,
        "spacing": rank.pace.spacing,
        "wanted": rank.pace.wanted,
        "costs": rank.pace.costs,
        "daemon_share": round(rank.daemon_share, 5),
        "unseen": list(rank.hello.unseen),
        "kernel_missing": rank.hello.facts.get("kernel_missing", ""),
        "stall": {
            "seconds": rank.stall.seconds,
            "limit": rank.stall.limit,
            "kind": str(rank.stall.kind),
            "quiet_seconds": rank.stall.quiet,
            "at": find_place(rank) if rank.standing else "",
        },
    }
