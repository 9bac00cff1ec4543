"""What a live daemon tells of itself: plain dicts for the command line and HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from sentinel import __version__
from sentinel.daemon.watched_run import WatchedRun
from sentinel.devices import Gpu
from sentinel.runs import Attempt, Rank


def status(watches: Iterable[WatchedRun]) -> dict[str, Any]:
    """The daemon and its runs."""
    return {"version": __version__, "pid": os.getpid(), "runs": [_run(watch) for watch in watches]}


def incidents(watches: Iterable[WatchedRun]) -> list[dict[str, Any]]:
    """The cases of all runs that are at hand, in the order in which they fired."""
    return [case.builtins() for watch in watches for case in watch.cases.values()]


def _run(watch: WatchedRun) -> dict[str, Any]:
    attempt = watch.attempt
    return {
        "run": watch.run.name,
        "run_id": watch.run.run_id,
        "attempt": attempt.number,
        "step": attempt.last_seq + attempt.step_offset,
        "values": attempt.present(),
        "ranks": [_rank(rank, attempt.silent()) for _, rank in sorted(attempt.ranks.items())],
        "gpus": _gpus(attempt),
        "host": dict(attempt.devices.host),
        "rules": [msgspec.to_builtins(rule) for rule in watch.evaluator.status()],
        "open_incidents": sum(case.state == "firing" for case in watch.cases.values()),
        "incidents": watch.book.fired.total(),
        "rollback": {
            "armed": any(rank.hello.rollback for rank in attempt.live),
            "phase": watch.rollback.phase,
            "done": [msgspec.to_builtins(outcome) for outcome in watch.rollback.done],
            "held": sorted({seq + attempt.step_offset for rank in attempt.live for seq in rank.snapshots}),
        },
        "silences": [msgspec.to_builtins(s) for s in watch.notifier.silences.of_run(watch.run.name, watch.run.run_id)],
        "notifications": watch.notifier.pipeline.status(),
        "notifications_trouble": watch.notifier.pipeline.trouble,
        "history": str(watch.store.path) if watch.store else "",
        "trouble": watch.store.trouble if watch.store else "no history is kept",
    }


def _gpus(attempt: Attempt) -> dict[str, Any]:
    """Those that the run trains on; `trouble` says why they are not read."""
    devices = attempt.devices
    on: dict[str, tuple[Gpu, list[int]]] = {}
    for rank in attempt.live:
        for gpu in devices.of(rank.hello.gpus):
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


def _rank(rank: Rank, silent: frozenset[int]) -> dict[str, Any]:
    return {
        "rank": rank.identity.rank,
        "pid": rank.identity.pid,
        "hostname": rank.identity.hostname,
        "state": "silent" if rank.state == "live" and rank.identity.rank in silent else rank.state,
        "phase": rank.phase,
        "step": rank.last_seq + rank.hello.step_offset,
        "heard_seconds": round(time.monotonic() - rank.heard, 3),
        "dropped": rank.dropped,
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
        },
    }
