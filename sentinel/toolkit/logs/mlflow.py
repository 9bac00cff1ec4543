"""Reads MLflow's file store: the folder of a run (`mlruns/EXPERIMENT/RUN/`), without the package.

`metrics/KEY` has a line for each value: Unix milliseconds, value, step. A key with slashes is a file in folders.
`meta.yaml` has the name of the run. Each metric has steps of its own; when those of the metric with most values go
back, the run was resumed, and later values belong to the new pass.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.rows import STEP_LIMIT
from sentinel.toolkit.logs.text import lines

NAME = "MLflow"

META, _METRICS = "meta.yaml", "metrics"
_SYSTEM = "system"
"""Folder of MLflow's own measurements, whose steps are counts of its own."""


class _Value(NamedTuple):
    time: int
    """Unix milliseconds."""
    value: float
    step: int


def is_run(folder: Path) -> bool:
    """Whether a folder is that of an MLflow run."""
    return (folder / META).is_file() and (folder / _METRICS).is_dir()


def read(path: Path) -> Recording:
    """Return all metrics of one run. Raises LogError if a file cannot be read."""
    recording = Recording(path, NAME)
    recording.run = _find_name(path / META)
    folder = path / _METRICS
    series = {
        file.relative_to(folder).as_posix(): _values(file, recording)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.relative_to(folder).parts[0] != _SYSTEM
    }
    longest = max(series.values(), key=len, default=[])
    resumed = [after.time for before, after in pairwise(longest) if after.step < before.step]
    rows = dict[tuple[int, int], tuple[float, dict[str, float]]]()
    for name, values in series.items():
        for time, value, step in values:
            row = rows.setdefault((bisect_right(resumed, time), step), (time / 1000, {}))
            row[1][name] = value
    for (_, step), (seconds, found) in sorted(rows.items(), key=lambda row: row[0]):
        recording.add(step, seconds, found)
    return recording


def _find_name(file: Path) -> str:
    try:
        meta = yaml.safe_load("\n".join(line for _, line in lines(file)))
    except yaml.YAMLError:
        return ""
    return str(meta.get("run_name") or meta.get("run_id") or "") if isinstance(meta, dict) else ""


def _values(file: Path, recording: Recording) -> list[_Value]:
    found = []
    for count, line in lines(file):
        words = line.split()
        if not words:
            continue
        value = number(words[1]) if len(words) == 3 else None
        try:
            time, step = int(words[0]), int(words[-1])
        except ValueError:
            value = None
        if value is None or not 0 <= step < STEP_LIMIT:
            recording.faults.add(count, f"{file.name}: `milliseconds value step` is expected in each line")
        else:
            found.append(_Value(time, value, step))
    return found
