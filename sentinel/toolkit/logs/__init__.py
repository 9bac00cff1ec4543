"""Reads recorded runs of any origin: a log file in, rows of metrics out.

    path -> find_logs -> read -> Recording -> choose_columns (which column is which metric) -> observations -> the rules

One module per format; each recognises files of its format by their content, and reads them. Unreadable lines of a log
are counted and quoted (`Recording.faults`), and are an error only if nothing else is left.
"""

from __future__ import annotations

from pathlib import Path

from sentinel.errors import LogError
from sentinel.naming import choose_columns
from sentinel.toolkit.logs import (
    deepspeed,
    history,
    jsonl,
    keyvalue,
    megatron,
    mlflow,
    table,
    tensorboard,
    trackio,
    trainer_state,
    wandb,
)
from sentinel.toolkit.logs.finding import LogFile, find_logs
from sentinel.toolkit.logs.recording import Recording
from sentinel.toolkit.logs.text import head

__all__ = ["FORMATS", "LogFile", "Recording", "choose_columns", "find_logs", "read"]

_READERS = (tensorboard, wandb, trainer_state, jsonl, table, megatron, deepspeed, keyvalue)
FORMATS = tuple(reader.NAME for reader in (history, trackio, mlflow, *_READERS))


def read(path: Path) -> list[Recording]:
    """Return the runs in a file; or the one in a folder of event files or of an MLflow run.

    Raises LogError, with the file and what is wrong.
    """
    if path.is_dir():
        return [(mlflow if mlflow.is_run(path) else tensorboard).read(path).check()]
    first = head(path)
    if trackio.recognise(path, first):
        return trackio.read(path)
    if history.recognise(path, first):
        return history.read(path)
    for reader in _READERS:
        if reader.recognise(path, first):
            return [reader.read(path).check()]
    raise LogError(f"{path}: not a log that can be read; formats: {', '.join(FORMATS)}")
