"""Finds the logs that names on the command line refer to, each with the name of its run."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sentinel.errors import LogError
from sentinel.toolkit.logs import mlflow

ENDINGS = (".sqlite", ".db", ".wandb", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".log", ".txt", ".out", ".err")
"""Endings of files that are read in a folder, gzipped or not. A file that the user names may have any ending."""

_COMMON = frozenset({"metrics", "trainer_state", "train", "log", "logs", "output", "stdout", "history", "loss"})
"""Common names of files, which do not distinguish runs."""


class LogFile(NamedTuple):
    """A log: a file, or a folder of event files or of an MLflow run."""

    path: Path
    run: str
    named: bool
    """Whether the user named it, rather than a folder in which it was found among other files."""


def find_logs(names: Iterable[str]) -> list[LogFile]:
    """Return the logs in these files, in folders and all folders in them, and under patterns.

    A folder of TensorBoard event files is one run, and so is one of MLflow. Of a W&B run its own file is taken, and not
    the files beside it. Of the Trainer's checkpoints, each of which holds the whole history so far, only the last is
    taken. Raises LogError if a name leads to nothing.
    """
    logs: dict[Path, bool] = {}
    for name in names:
        matched = [Path(name)] if Path(name).exists() else sorted(map(Path, glob.glob(name, recursive=True)))
        if not matched:
            raise LogError(f"{name}: no such file or folder")
        for path in matched:
            inside = _inside(path) if path.is_dir() else [path]
            if not inside and len(matched) == 1:
                raise LogError(f"{path}: no log in this folder; looked for *{', *'.join(ENDINGS)} and event files")
            for log in inside:
                logs.setdefault(log, log == path)
    runs = _runs(list(logs))
    return [LogFile(path, runs[path], named) for path, named in logs.items()]


def _inside(folder: Path) -> list[Path]:
    tracked = {path.parent for path in folder.rglob(mlflow.META) if mlflow.is_run(path.parent)}
    beside = {file.parent for file in folder.rglob("run-*.wandb") if _has_own_folder(file)}
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not path.name.startswith(".")
        and tracked.isdisjoint(path.parents)
        and (path.suffix == ".wandb" or beside.isdisjoint(path.parents))
    )
    events = dict.fromkeys(path.parent for path in files if "tfevents" in path.name)
    states = [path for path in files if path.name == "trainer_state.json"]
    last = {_trainer(path): path for path in sorted(states, key=_checkpoint)}
    others = [
        path
        for path in files
        if path.name.removesuffix(".gz").endswith(ENDINGS) and path not in states and "tfevents" not in path.name
    ]
    return sorted([*tracked, *events, *last.values(), *others])


def _has_own_folder(file: Path) -> bool:
    """Whether a W&B file is in its original place: `run-ID.wandb` in a folder `[offline-]run-TIME-ID`."""
    return file.absolute().parent.name.endswith(file.stem.removeprefix("run"))


def _checkpoint(state: Path) -> int:
    number = state.parent.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else 1 << 62  # the folder of the run itself: written at its end


def _trainer(state: Path) -> Path:
    return state.parent.parent if state.parent.name.startswith("checkpoint-") else state.parent


def _runs(paths: list[Path]) -> dict[Path, str]:
    """Return a name for each log: the file's name after as many folders as needed to distinguish them."""
    depth = {path: 2 if _stem(path) in _COMMON else 1 for path in paths}
    while True:
        names = {path: "/".join((*path.absolute().parts[:-1], _stem(path))[-depth[path] :]) for path in paths}
        counts = Counter(names.values())
        unclear = [path for path in paths if counts[names[path]] > 1 and depth[path] < len(path.absolute().parts)]
        if not unclear:
            return names
        for path in unclear:
            depth[path] += 1


def _stem(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name[: name.rindex(".")] if name.endswith(ENDINGS) else name
