"""The summary of a run for the line at its end, as far as its daemon has judged it."""

from __future__ import annotations

from sentinel import wire
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.diagnose import folding
from sentinel.diagnose.explainers.memory import measure_unjudged_rise
from sentinel.runs.attempt import Attempt
from sentinel.store import Store
from sentinel.text import join_names, name_lost_steps, name_nodes, name_ranks, name_worst, rank_severity

SHOWN = 3
"""Most incidents of other nodes that are named."""


def summarize_run(watch: WatchedRun) -> wire.RunSummary | None:
    """Return the summary of a run; None if no step of its present attempt was judged."""
    attempt, judged_to = watch.run.attempt, watch.incidents.judged_to
    if judged_to < 0:
        return None
    counts = dict[str, int]()
    for (_, severity), number in watch.incidents.log.fired.items():
        counts[severity] = counts.get(severity, 0) + number
    cases = watch.incidents.log.cases
    severities = [folding.IncidentSeverity(case.id, case.parent, case.severity) for case in cases.values()]
    worst = folding.find_worst(severities) if severities else None
    first = cases[worst.id] if worst is not None else None
    written = watch.actions.publishing.written
    return wire.RunSummary(
        steps=judged_to + 1,
        step=judged_to + attempt.step_offset,
        cut=any(rank.goodbye is None for rank in attempt.ranks.values()),
        lost=max((rank.dropped for rank in attempt.ranks.values()), default=0),
        incidents=counts,
        worst=name_worst(first.alert, first.step, grew=first.severity != worst.severity) if first and worst else "",
        rose=measure_unjudged_rise(attempt.recent, {case.problem for case in cases.values()}),
        snapshot=written + attempt.step_offset if written is not None else None,
        kept=watch.store is not None and watch.store.is_open,
        seconds=max(attempt.find_end() - watch.run.began, 0.0),
        nodes=max((count_nodes(rank.identity) for rank in attempt.ranks.values()), default=1),
        elsewhere=_name_open_elsewhere(watch),
        unheard=_name_unheard(attempt),
        lacks=_describe_gap(watch.store) if watch.store is not None and watch.store.is_open else "",
    )


def _name_open_elsewhere(watch: WatchedRun) -> str:
    """Return the job's open incidents on other nodes only, the worst first: they may be why the run ended here."""
    found = watch.membership.list_open_elsewhere() if watch.membership is not None else []
    found.sort(key=lambda one: (-rank_severity(one.severity), one.first_step))
    names = [
        f"{one.severity} {one.alert} at step {one.first_step:,} ({name_nodes(one.nodes)})".strip() for one in found
    ]
    return join_names(names, SHOWN)


def _name_unheard(attempt: Attempt) -> str:
    """Return the ranks that said no goodbye, if another rank ended by an exception; otherwise "".

    They are connected or lost, may be the cause of the exception, and are judged later.
    """
    ends = {number: rank.goodbye for number, rank in attempt.ranks.items()}
    if not any(goodbye is not None and goodbye.reason == "exception" for goodbye in ends.values()):
        return ""
    missing = sorted(number for number, goodbye in ends.items() if goodbye is None)
    return name_ranks(missing) if missing else ""


def _describe_gap(store: Store) -> str:
    """Return what the history lacks at the end of the run; whether rows in the queue get stored is not known yet."""
    if store.trouble:
        return "its history is incomplete: it cannot be written at the moment"
    lost = store.dropped.get("steps", 0)
    return name_lost_steps(lost) if lost else ""
