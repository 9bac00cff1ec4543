"""The tools of `sentinel mcp`: each says what a command prints with --json. Their docstrings are what a model reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from sentinel.cli import (
    doctor,
    explain,
    hang,
    history,
    incidents,
    last,
    memory,
    plan,
    reload,
    report,
    rule_status,
    silence,
)
from sentinel.cli.quoted import quote_data
from sentinel.config import settings
from sentinel.engine.judging.judgement import STATES
from sentinel.errors import ConfigError
from sentinel.store import RUN, History
from sentinel.text import rank_severity
from sentinel.toolkit.memory.findings import findings
from sentinel.toolkit.memory.reading import read
from sentinel.toolkit.memory.stacks import growing
from sentinel.toolkit.plan.recipe import CARDS, OPTIMIZERS, PRECISIONS

INCIDENTS, RANKS, STEPS, SIGNALS, STACKS = 50, 16, 200, 16, 10
"""Most of each in one answer; RANKS: of each listed incident."""
MOST_SIZE = 10**9
_OF_INCIDENT = ("id", "run", "run_id", "alert", "severity", "state", "first_step", "step", "time", "summary")


def list_runs(since: str = "") -> str:
    """List training runs, live and ended, worst first: state (running, stalled, ended, stopped, failed), exit status,
    step, loss, incidents by severity, newest snapshot. `since`: how far back, as `12h` or `7d`; empty: since yesterday.
    """
    rows, _, damaged = last.collect_outcomes(None, _read_duration(since) if since else None)
    return quote_data({"runs": rows, "damaged": damaged})


def list_incidents(run: str = "", cursor: str = "", limit: int = 25) -> str:
    """List incidents, the one that changed last at the end, each with cause, confidence, remedy, step, ranks and the
    command that shows it. `run`: name, id or its beginning; empty: all. `cursor`: that of an earlier answer, to get
    only what fired or ended since; empty: the newest `limit`.
    """
    limit = min(max(limit, 1), INCIDENTS)
    after = _read_cursor(cursor) if cursor else None
    cases = sorted(incidents.collect_incidents(_complete_run(run)), key=_find_last_change)
    found = cases[-limit:] if after is None else [case for case in cases if _find_last_change(case) > after][:limit]
    newest = msgspec.json.encode(_find_last_change(found[-1])).decode() if found else cursor
    return quote_data({"incidents": [_summarize(case) for case in found], "cursor": newest, "in_all": len(cases)})


def show_incident(id: str, run: str = "") -> str:
    """Show one incident whole: evidence, cause and confidence, what to do, ranks and layers, stacks, what was done.
    `id` as `0.1`; `run`: name, id or its beginning, needed where several runs have that id.
    """
    case = incidents.find_incident(id, _complete_run(run))
    return quote_data(case | {"command": _name_command(case)})


def read_series(
    run: str, signals: Sequence[str] = ("loss",), step: int | None = None, around: int = 50, rank: int | None = None
) -> str:
    """Read signals of a run (`loss`, `grad_norm`, `learning_rate`, `step_seconds`, ...) in the newest attempt, `around`
    steps before and after `step`; without a step the last ones. `rank`: of one rank instead of the run. The answer
    names all signals that there are.
    """
    if run.endswith(".sqlite"):
        raise ConfigError("name a run, or its id; no file")
    around = min(max(around, 1), STEPS // 2)
    with History(history.find_history(run)) as kept:
        attempt, which = kept.attempts()[-1][0], RUN if rank is None else rank
        rows = history.read_rows(kept, attempt, which, layers=False)
        if step is None:
            chosen = list(deque(rows, 2 * around))
        else:
            until = takewhile(lambda row: row["step"] <= step + around, rows)
            chosen = [row for row in until if row["step"] >= step - around]
        names = kept.signals(attempt=attempt, rank=which)
        wanted = ["step", "time", *list(signals)[:SIGNALS]]
        series = {name: [row.get(name) for row in chosen] for name in wanted}
        return quote_data({"run_id": kept.run_id, "attempt": attempt, "series": series, "signals": names})


def list_rules(run: str = "") -> str:
    """List all rules, and where they stand in the runs that are watched now (firing, pending, warming, no data, ...)
    with their current numbers: firing ones first, inactive ones only counted. `run`: name, id or its beginning; empty:
    all.
    """
    states = rule_status.pick_rules(rule_status.find_runs(_complete_run(run)))
    for found in states:
        states_of_rules = sorted(found["rules"], key=lambda rule: STATES.index(rule["state"]))
        found["rules"] = [rule for rule in states_of_rules if rule["state"] != "inactive"]
        found["inactive"] = len(states_of_rules) - len(found["rules"])
    rules = sorted(
        explain.summarize_rules(explain.load_rulebook().rules), key=lambda rule: -rank_severity(rule["severity"])
    )
    return quote_data({"runs": states, "rules": rules})


def explain_alert(alert: str) -> str:
    """Explain an alert: what it means, how to tell its causes apart, what to do, and its rule."""
    return quote_data(explain.describe_rule(explain.find_rule(alert, explain.load_rulebook().rules)))


def survey_hang() -> str:
    """Ask all ranks of the runs that are watched now where they stand, which takes up to two seconds: which rank is
    missing in which collective, and why. It interrupts each rank for milliseconds.
    """
    return quote_data(hang.survey_runs())


def compare_runs(run: str, other: str) -> str:
    """Compare two runs (names or ids): steps, duration, final loss, incidents, rollbacks of each."""
    if any(name.endswith(".sqlite") for name in (run, other)):
        raise ConfigError("name runs, or their ids; no files")
    return quote_data([report.list_figures(one) for one in report.read_reports((run, other))])


def check_environment() -> str:
    """Check this machine's environment for known mistakes, as `sentinel doctor` does without a command."""
    return quote_data(msgspec.to_builtins(doctor.check_environment()))


def plan_memory(
    params: str = "", layers: int | None = None, hidden: int | None = None, heads: int | None = None,
    sequence: int | None = None, batch: int = 1, gpus: int = 1, gpu: str = "h100", precision: str = "mixed",
    optimizer: str = "adamw",
) -> str:  # fmt: skip
    """Estimate the memory that training a transformer needs on each GPU, and rank the strategies (DDP, FSDP, LoRA),
    the fastest that fits first. Give `params` as `7.5B`, or `layers` and `hidden`; `sequence` (tokens a sample) for
    activations. `batch`: samples per GPU and step.
    """
    for value, known in ((gpu, CARDS), (precision, PRECISIONS), (optimizer, OPTIMIZERS)):
        if value not in known:
            raise ConfigError(f"there is no {value!r}: {', '.join(sorted(known))}")
    sizes = (batch, gpus, *(size for size in (layers, hidden, heads, sequence) if size is not None))
    if not 1 <= min(sizes) <= max(sizes) <= MOST_SIZE:
        raise ConfigError(f"sizes and counts are 1 or more, and at most {MOST_SIZE:,}")
    given = {
        "params": params or None, "layers": layers, "hidden": hidden, "heads": heads, "vocab": 50_000, "batch": batch,
        "sequence": sequence, "inputs": (), "gpus": gpus, "gpu": gpu, "gpu_memory": None, "link": "50GB",
        "precision": precision, "optimizer": optimizer, "micro_batch": None, "checkpointing": None, "lora_rank": 16,
        "cpu": False,
    }  # fmt: skip
    return quote_data(msgspec.to_builtins(plan.rank_candidates(None, given)[2]))


def read_memory_snapshot(snapshots: Sequence[str]) -> str:
    """Read what torch.cuda.memory._dump_snapshot wrote (files, the oldest first): fragmentation, the stacks that hold
    the most, and of several snapshots what grew. Nothing in a file is run.
    """
    files = [read(Path(name)) for name in snapshots]
    if not files:
        raise ConfigError("name at least one file of torch.cuda.memory._dump_snapshot")
    growth = growing(files) if len(files) > 1 else []
    return quote_data(memory.describe_snapshots(files, growth, findings(files, growth), STACKS))


def silence_alert(alert: str, duration: str, run: str = "", comment: str = "") -> str:
    """Mute an alert (a name or a pattern, as `Loss*`) for a while, as `2h`: it is recorded, but not sent."""
    seconds = _read_duration(duration)
    if seconds <= 0 or not alert or not (alert + run + comment).isprintable():
        raise ConfigError("a silence wants an alert, a duration above 0 as 2h, and no control characters")
    return quote_data(msgspec.to_builtins(silence.add_silence(alert, run, seconds, comment)))


def reload_rules() -> str:
    """Have the daemons on this machine read rule files and settings again. A bad file leaves the rules as they are."""
    return quote_data(reload.reload_daemons())


READING: tuple[Callable[..., str], ...] = (
    list_runs, list_incidents, show_incident, read_series, list_rules, explain_alert, survey_hang, compare_runs,
    check_environment, plan_memory,
)  # fmt: skip
LOCAL: tuple[Callable[..., str], ...] = (read_memory_snapshot,)
"""Tools that open files named by the caller, and take a while: not offered by a daemon that serves HTTP."""
CHANGING: tuple[Callable[..., str], ...] = (silence_alert, reload_rules)


def _complete_run(run: str) -> str | None:
    return history.complete_run(run) if run else None


def _find_last_change(case: dict[str, Any]) -> tuple[float, str, str]:
    """Return when a case last fired or ended, and its ids, which order cases of the same moment."""
    return max(case["time"], case.get("resolved_time") or 0.0), case["run_id"], case["id"]


def _read_cursor(cursor: str) -> tuple[float, str, str]:
    try:
        return msgspec.json.decode(cursor, type=tuple[float, str, str])
    except msgspec.DecodeError:
        raise ConfigError("cursor: not one of an earlier answer; leave it out") from None


def _read_duration(text: str) -> float:
    try:
        return settings.duration(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _summarize(case: dict[str, Any]) -> dict[str, Any]:
    diagnosis = case["diagnosis"]
    ranks = [member["name"] for member in case["members"] if member["scope"] == "rank"][:RANKS]
    told = {"cause": diagnosis["cause"], "confidence": diagnosis["confidence"], "remedy": diagnosis["remedy"]}
    return {key: case[key] for key in _OF_INCIDENT} | told | {"ranks": ranks, "command": _name_command(case)}


def _name_command(case: dict[str, Any]) -> str:
    return f"sentinel incidents show {case['id']} --run {case['run_id']}"
