"""The lines that `sentinel top` shows, made only from the answers of daemons, for any size of terminal."""

from __future__ import annotations

import math
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sentinel.cli import job_status
from sentinel.cli.device_status import describe_gpu
from sentinel.errors import ConfigError
from sentinel.runs import RANK_MARKS, snapshot_age
from sentinel.text import format_count, in_words, name_ranks, spell_line

_LEVELS = "▁▂▃▄▅▆▇█"
_TRACED = ("loss", "grad_norm")
_PHASES = ("data", "forward", "backward", "optimizer", "other")
_PAST = 512
"""The most samples of a signal that are remembered."""
_LABEL = 11
_NODES = 8
"""The most nodes of a job that get a line each."""
_STYLES = {"silent": "red", "left": "dim"}
_LEAST = 24
"""The fewest columns for which words are wrapped."""


class TopLine(NamedTuple):
    """A line and its rich style."""

    text: str
    style: str = ""


class Traces:
    """The past of each run's loss and gradient norm: from its history at first, then from the daemons' answers."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], deque[float]] = {}
        self._steps: dict[str, int] = {}

    def add(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """Add what the runs report now."""
        for run in runs:
            key = run["run_id"]
            if key not in self._steps:
                self._remember(run)
            if run["step"] != self._steps.get(key):
                for name in _TRACED:
                    if name in run["values"]:
                        self._find_values(key, name).append(float(run["values"][name]))
            self._steps[key] = run["step"]

    def list_values(self, run_id: str, name: str) -> list[float]:
        """Return the values of a signal, the oldest first."""
        return list(self._find_values(run_id, name))

    def _find_values(self, run_id: str, name: str) -> deque[float]:
        return self._values.setdefault((run_id, name), deque(maxlen=_PAST))

    def _remember(self, run: Mapping[str, Any]) -> None:
        from sentinel.store import History

        if not run.get("history"):
            return
        try:
            with History(Path(run["history"])) as history:
                for name in _TRACED:
                    values = history.series(name, attempt=run["attempt"]).values
                    self._find_values(run["run_id"], name).extend(values[-_PAST:])
        except (ConfigError, OSError):  # another user's, or not complete yet: the past is then not shown
            return


def frame(
    runs: Sequence[Mapping[str, Any]],
    cases: Sequence[Mapping[str, Any]],
    traces: Traces,
    width: int,
    height: int,
    unasked: Sequence[str] = (),
) -> list[TopLine]:
    """Return at most `height` lines of at most `width` characters. `unasked`: nodes whose incidents are not among
    `cases`, in words."""
    opened = [case for case in cases if case["state"] == "firing"]
    lines = [TopLine(_head(len(runs), len(opened), width), "bold red" if opened else "bold")]
    if not runs:
        lines.append(TopLine("No run is watched on this node."))
    for run in runs:
        lines += _run(run, traces, width)
    lines += [line for words in unasked for line in _wrap("", words, width, "yellow")]
    lines += _incidents(cases, max(3, height - len(lines)), width)
    if len(lines) > height:
        lines = [*lines[: height - 1], TopLine(f"and {len(lines) - height + 1} lines more", "dim")]
    return [TopLine(spell_line(line.text)[:width], line.style) for line in lines]


def _head(runs: int, opened: int, width: int) -> str:
    left = f"sentinel top   {format_count(runs, 'run')}   {format_count(opened, 'incident')} open"
    return f"{left:<{max(0, width - 8)}} q ends"


def _run(run: Mapping[str, Any], traces: Traces, width: int) -> list[TopLine]:
    values = run["values"]
    attempt = f", attempt {run['attempt']}" if run["attempt"] else ""
    lines = [TopLine(""), TopLine(f"{run['run']} ({run['run_id']}{attempt})  step {run['step']}", "bold")]
    for name in _TRACED:
        past = traces.list_values(run["run_id"], name)
        if past:
            lines.append(TopLine(_trace(name, past, width)))
    if "step_seconds" in values:
        lines.append(TopLine(_phases(values)))
    lines += _row("", _facts(run), width)
    if said := snapshot_age.in_words(run["rollback"]):
        lines += _row("", said, width)
    lines += _ranks(run["ranks"], width)
    if run.get("job"):
        lines += _job(run["job"], width)
    for gpu in run["gpus"]["devices"][:8]:
        lines.append(TopLine(f"gpu {gpu['gpu']:<{_LABEL - 4}}{', '.join(describe_gpu(gpu['values']))}"))
    if run["trouble"]:
        lines += _row("trouble", run["trouble"], width, "yellow")
    return lines


def _row(label: str, words: str, width: int, style: str = "") -> list[TopLine]:
    return _wrap(f"{label:<{_LABEL}}", words, width, style)


def _wrap(head: str, words: str, width: int, style: str = "") -> list[TopLine]:
    """Return `words` after `head`, in as many lines as they need."""
    if width - len(head) < _LEAST:
        return [TopLine(head + words, style)]
    lines = textwrap.wrap(spell_line(words), width - len(head)) or [""]
    return [TopLine((head if at == 0 else " " * len(head)) + line, style) for at, line in enumerate(lines)]


def _trace(name: str, past: Sequence[float], width: int) -> str:
    finite = [value for value in past if math.isfinite(value)]
    span = f"{min(finite):.3g} to {max(finite):.3g}" if finite else "not finite"
    room = max(8, width - _LABEL - 11 - len(span) - 2)
    return f"{name:<{_LABEL}}{past[-1]:<11.4g}{sparkline(past, room)}  {span}"


def sparkline(past: Sequence[float], width: int) -> str:
    """Return a line with the newest samples at the right; a character shows the highest of its samples, or x where one
    is not finite. Logarithmic where they span two decades or more: a spike would flatten all else."""
    share = max(1, -(-len(past) // width))
    cells = [past[at : at + share] for at in range(0, len(past), share)]
    finite = [value for value in past if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    height = math.log10 if low > 0 and high >= 100 * low else float
    # Halved: the distance from -1e308 to 1e308 exceeds the largest float.
    bottom, room = height(low) / 2, (height(high) / 2 - height(low) / 2) or 1.0

    def level(cell: Sequence[float]) -> str:
        if not all(map(math.isfinite, cell)):
            return "x"
        return _LEVELS[min(7, int((height(max(cell)) / 2 - bottom) / room * 8))]

    return "".join(map(level, cells)).rjust(width)


def _phases(values: Mapping[str, float]) -> str:
    seconds = {name: values.get(f"{name}_seconds", 0.0) for name in _PHASES}
    total = max(values["step_seconds"], sum(seconds.values())) or 1.0  # of many ranks, each phase is the slowest rank's
    shares = [(name, part / total) for name, part in seconds.items()]
    said = "  ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
    return f"{'step':<{_LABEL}}{values['step_seconds'] * 1e3:<8.4g}ms {said}"


def _facts(run: Mapping[str, Any]) -> str:
    values, rollback = run["values"], run["rollback"]
    held = ", ".join(map(str, rollback["held"])) or "none yet"
    said = [f"{name} {values[name]:.3g}" for name in ("learning_rate", "loss_scale") if name in values]
    said.append(f"snapshots {held}" if rollback["armed"] else "rollback not armed")
    said += [f"{len(rollback['done'])} rolled back"] if rollback["done"] else []
    return ", ".join(said)


def _ranks(ranks: Sequence[Mapping[str, Any]], width: int) -> list[TopLine]:
    """Return a character for each rank; below it, the ranks that are not live."""
    marks = "".join(RANK_MARKS.get(rank["state"], "?") for rank in ranks)
    room = max(8, width - _LABEL)
    odd = [rank for rank in ranks if rank["state"] not in ("live", "gone")]
    lines = [
        TopLine(f"{'ranks' if at == 0 else '':<{_LABEL}}{marks[at : at + room]}", "red" if odd else "")
        for at in range(0, len(marks), room)
    ]
    phases = sorted({rank["phase"] for rank in ranks if rank["phase"]})
    if len(ranks) == 1 and not odd:
        lines = []
    if phases:
        lines.append(TopLine(f"{'phase':<{_LABEL}}{', '.join(phases)}"))
    for rank in odd[:3]:
        stall = rank["stall"]["seconds"]
        since = f", no progress for {stall:.0f} s" if stall > 0 else ""
        since += f" at {at}" if (at := rank["stall"].get("at")) else ""  # a daemon of an earlier version does not say
        lines += _row("", f"rank {rank['rank']} is {rank['state']} at step {rank['step']}{since}", width, "red")
    return lines


def _job(job: Mapping[str, Any], width: int) -> list[TopLine]:
    """Return lines of the job's nodes, with their ranks: first those that are not heard, then those that are behind."""
    stale = job_status.is_stale(job)
    heard = 1 if stale else sum(node["state"] != "silent" for node in job["nodes"])
    here = "the " * (job["view"] == "coordinator") + job_status.describe_view(job)
    lines = _row("job", f"{heard} of {job['expected']} nodes heard; this is {here}", width, "yellow" if stale else "")
    if shrunk := job_status.describe_shrink(job):
        lines += _row("", shrunk, width, "yellow")
    nodes = sorted(job["nodes"], key=lambda node: (node["state"] == "alive", node["step"], node["node"]))
    for node in nodes[:_NODES]:
        ranks = name_ranks(sorted(map(int, node["ranks"]))) if node["ranks"] else "no ranks"
        words = f"{job_status.describe_node(job, node)}, {ranks}"
        lines += _row(f"node {node['node']}", words, width, _STYLES.get(node["state"], ""))
    if more := nodes[_NODES:]:
        states = ", ".join(sorted({node["state"] for node in more}))
        first, last = min(node["step"] for node in more), max(node["step"] for node in more)
        lines.append(TopLine(f"{'':<{_LABEL}}and {len(more)} more nodes, {states}, at steps {first} to {last}"))
    if missing := job_status.describe_missing(job):
        lines.append(TopLine(f"{'':<{_LABEL}}{missing}", "yellow"))
    return lines


def _incidents(cases: Sequence[Mapping[str, Any]], room: int, width: int) -> list[TopLine]:
    """Return lines of the incidents: open ones last, and marked; of those that are over, as many as there is room."""
    if not cases:
        return []
    cases = sorted(cases, key=lambda case: case["state"] == "firing")
    rows, left = list[list[TopLine]](), max(1, room - 2)
    columns = zip(*((case["alert"], str(case["step"]), in_words(case["state"])) for case in cases), strict=True)
    wide = [max(map(len, column)) for column in columns]
    for case in reversed(cases):
        row = _incident(case, wide, width)
        row = row if len(row) <= left else row[:left]
        rows.insert(0, row)
        left -= len(row)
        if left <= 0:
            break
    title = "incidents" + (f", the last {len(rows)}" if len(rows) < len(cases) else "")
    return [TopLine(""), TopLine(title, "bold"), *(line for row in rows for line in row)]


def _incident(case: Mapping[str, Any], wide: Sequence[int], width: int) -> list[TopLine]:
    mark = "!" if case["state"] == "firing" else " "
    style = {"critical": "red", "warning": "yellow"}.get(case["severity"], "") if mark == "!" else "dim"
    head = f"{mark} {case['alert']:<{wide[0]}}  step {case['step']:<{wide[1]}}  {in_words(case['state']):<{wide[2]}}  "
    return _wrap(head, case["summary"], width, style)
