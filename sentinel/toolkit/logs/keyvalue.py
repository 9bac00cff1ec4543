"""Reads what training loops print: lines of text in which names stand before numbers.

    iter 10: loss 3.2412, time 120.31ms, mfu 17.20%                                       nanoGPT
    step   10/18865 | loss 9.5 (+1.2z)| norm 15.4 (-0.1z)| lr 8.6e-07 | 1553.26 ms        llm.c
    [07/08 19:36:21 d2.utils.events]:  eta: 2:14:53  iter: 19  total_loss: 5.07  lr: 0.001          detectron2
    [step=10/1000,epoch=1]                                                                OLMo, a number a line after it
        train/CE loss=10.52
    :::MLLOG {..., "key": "train_loss", "value": 7.1, "metadata": {"step": 64}}           MLPerf
    2024-05-01 12:00:00,123 - INFO - Epoch 1 step 10 loss=2.31                            logging
    {'loss': 2.31, 'learning_rate': 1e-05, 'epoch': 0.1}                                  the Trainer's progress
    | loss          | 2.31     |                            a table a step: guided-diffusion, by Baselines' logger

Lines that name a loss or a step are read; other lines (settings, progress of a download) are ignored. A line without a
step belongs to the step before it if losses have steps of their own, and otherwise is the next step. Names are in lower
case. If lines name their rank, those of rank 0 are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sentinel.naming import is_loss
from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.text import HEAD_LINES, lines, plain, seconds

NAME = "text with names and numbers"

LEAST_ROWS = 2
"""Least rows with a loss in a log: a single one may be a sentence of a README."""

_WORD = r"(?<![\w/@.\-])[A-Za-z_][\w/@.\-]*+"
_NUMBER = r"[-+]?(?:(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|nan\b|inf(?:inity)?\b)"
_PAIR = re.compile(
    rf"({_WORD}(?: {_WORD}){{0,3}})\s*[:=\s]\s*(?:tensor\(|\[)?\s*({_NUMBER})(?!\d|[:.\-]\d)(ms\b)?", re.IGNORECASE
)
"""A name and its number. Dates, durations of hours and minutes, and versions do not match: they go on after a colon, a
dash or a second dot."""
_BLOCK = re.compile(rf"^\s+(\S[^=]*?)\s*=\s*({_NUMBER})\s*$", re.IGNORECASE)
"""A line of a block: its name may have any words."""
_CELLS = re.compile(rf"^\s*+\|\s*+([^|\s][^|]*+)\|\s*+({_NUMBER})\s*+\|\s*+$", re.IGNORECASE)
"""A row of a table with a name and its number. Rows of text, such as headings, may stand between such rows."""
_MLLOG = re.compile(r'"key": "(\w+)", "value":')
_QUOTES = str.maketrans("'\"", "  ")
_STAMP = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR)\b")
_OTHER_RANK = re.compile(r"\[(?:rank|default)\s?[1-9]", re.IGNORECASE)
_LIKELY = re.compile(r"loss|nll|\bstep|\biter|num_updates", re.IGNORECASE)
_LENGTHS = frozenset({"time", "dt"})
"""Names of a step's duration, if milliseconds follow."""
_STEPS = (*rows.STEPS, "step_num", "samples_count")
"""Keys of a step; the last is MLPerf's, which counts samples if it counts no steps."""


class _Line(NamedTuple):
    """The step, time and values in one line."""

    step: int | None
    time: float | None
    values: dict[str, float]
    block: bool
    """Whether it belongs to the line before it."""

    @property
    def tells_loss(self) -> bool:
        return any(map(is_loss, self.values))

    @property
    def opens_block(self) -> bool:
        return self.block or (self.step is not None and not self.tells_loss)


def recognise(path: Path, head: bytes) -> bool:
    """Whether two lines of the file name a loss."""
    if b"\0" in head:
        return False
    found = (line for line in _parse_lines(path, HEAD_LINES) if line.tells_loss)
    return sum(1 for _ in islice(found, LEAST_ROWS)) == LEAST_ROWS


def read(path: Path) -> Recording:
    """Return a row for each step with a loss, with the step's other values; or, without steps, for each line with a
    loss."""
    recording, stepped = Recording(path, NAME), _losses_have_steps(path)
    opened, time, last = None, None, None
    for line in _parse_lines(path):
        if not line.block:
            opened, time = line.step, line.time
        step = last if opened is None else opened
        if not stepped:
            if line.tells_loss:
                recording.add(None, time, line.values)
        elif line.tells_loss or line.block or step == last:
            recording.add(step, time, line.values)
            last = step
    return recording


def _losses_have_steps(path: Path) -> bool:
    """Whether lines with a loss name a step, or stand in the block of a line that does.

    A third of them is enough: lines of an evaluation, or with a part of the loss, often name none.
    """
    balance, in_step = 0, False
    for line in _parse_lines(path):
        in_step = line.step is not None or (line.block and in_step)
        if line.tells_loss:
            balance += 2 if in_step else -1
    return balance >= 0


def _parse_lines(path: Path, most: int | None = None) -> Iterator[_Line]:
    """Yield each line with a step or a loss, and the lines of a block after it."""
    in_block, table = False, dict[str, float]()
    for _, text in islice(lines(path), most):
        for part in plain(text).split("\r"):  # progress bars overwrite each other
            if cells := _CELLS.match(part):
                table[_name(cells[1])] = float(cells[2].replace(",", ""))
                continue
            if table and not part.lstrip().startswith("|"):
                yield from _close_table(table)
                table = {}
            found = _parse_block(part) if in_block else None
            if found is None and _LIKELY.search(part) and not _OTHER_RANK.search(part):
                found = _parse_line(part)
            in_block = found is not None and found.opens_block
            if found is not None:
                yield found
    if table:
        yield from _close_table(table)


def _close_table(table: dict[str, float]) -> Iterator[_Line]:
    line = _make_line(None, table)
    if line is not None:
        yield line


def _parse_block(text: str) -> _Line | None:
    pair = _BLOCK.match(text)
    value = _value(pair[2]) if pair else None
    return _Line(None, None, {pair[1].lower(): value}, True) if pair and value is not None else None


def _parse_line(text: str) -> _Line | None:
    values = _pairs(_LEVEL.sub(" ", _MLLOG.sub(r'"\1":', text)).translate(_QUOTES))
    stamp = _STAMP.search(text)
    time = seconds(stamp[0].replace("/", "-").replace(",", ".")) if stamp else None
    if "time_ms" in values:
        time = values.pop("time_ms") / 1e3
    return _make_line(time, values)


def _make_line(time: float | None, values: dict[str, float]) -> _Line | None:
    key = next((key for key in _STEPS if key in values), None)
    step = values.pop(key) if key is not None else -1.0
    line = _Line(int(step) if 0 <= step < rows.STEP_LIMIT else None, time, values, False)
    return line if line.tells_loss or line.step is not None else None


def _pairs(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, digits, milliseconds in _PAIR.findall(text):
        value, key = _value(digits), _name(name)
        if value is not None and key not in values:
            values["step_seconds" if milliseconds and key in _LENGTHS else key] = value / (1e3 if milliseconds else 1)
    return values


def _name(words: str) -> str:
    """Return a name in lower case; of a step's name (`training step`, `root Iteration`) only the word for the step."""
    name = " ".join(words.lower().split())
    last = name.rpartition(" ")[2]
    joined = name.replace(" ", "_")
    return next((key for key in (joined, last) if key in _STEPS or key == "epoch"), name)


def _value(digits: str) -> float | None:
    return number(digits.replace(",", ""))
