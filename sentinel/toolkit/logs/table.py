"""Reads comma-, tab- or semicolon-separated values with a header: Lightning's metrics.csv, W&B's and TensorBoard's CSV.

Lightning writes one row for the training metrics of a step and another for its validation metrics, and leaves the other
cells empty: rows of one step are joined, and an empty cell is no sample.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.text import lines

NAME = "CSV"

_EMPTY = frozenset({"", "none", "null", "n/a", "na", "-"})


def recognise(path: Path, head: bytes) -> bool:
    """Whether a line of names is followed by a line of as many cells, with a number among them."""
    written = [line for line in head.decode("utf-8-sig", "replace").splitlines() if line.strip()]
    comments = list(itertools.takewhile(_is_comment, written))
    first, *others = written[len(comments) :][:2] or [""]
    if comments and _read_commented_header(comments[-1], first):
        return True
    return bool(others) and _is_header(*(_split(line, _delimiter(first)) for line in (first, others[0])))


def read(path: Path) -> Recording:
    """Return all rows of a file."""
    recording = Recording(path, NAME)
    header: list[str] = []
    textual: set[str] = set()
    for count, cells in _cells(path, recording):
        if not header:
            header = cells
        elif cells == header:
            continue  # a run that was started again wrote the header again
        elif len(cells) != len(header):
            recording.faults.add(count, f"{len(cells)} cells, and the header has {len(header)}")
        else:
            rows.take(recording, count, _row(recording, count, dict(zip(header, cells, strict=True)), textual))
    return recording


def _cells(path: Path, recording: Recording) -> Iterator[tuple[int, list[str]]]:
    delimiter = comment = ""
    for count, line in lines(path):
        if not line.strip():
            continue
        if _is_comment(line):
            comment = line
            continue
        if not delimiter:
            delimiter = _delimiter(line) or ","
            if comment and (header := _read_commented_header(comment, line)):
                yield count, header
        try:
            yield count, _split(line, delimiter)
        except csv.Error:
            recording.faults.add(count, "no row of cells: a carriage return in it, or a cell of more than 128 KiB")


def _is_comment(line: str) -> bool:
    return line.startswith("#")


def _read_commented_header(comment: str, line: str) -> list[str]:
    """Return the names in a comment before the first line, as numpy.savetxt writes them; [] if it has none."""
    names, cells = (_split(one, _delimiter(line)) for one in (comment.lstrip("# "), line))
    return names if _is_header(names, cells) else []


def _is_header(names: list[str], cells: list[str]) -> bool:
    """Whether these are names of as many cells, with a number among them."""
    named = all(number(name) is None for name in names) and len({*names}) == len(names) > 1
    return named and len(names) == len(cells) and any(number(cell) is not None for cell in cells)


def _split(line: str, delimiter: str) -> list[str]:
    """Return the cells of a line. Raises csv.Error."""
    return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter or ","), [])]


def _delimiter(header: str) -> str:
    return max(("\t", ";", ","), key=header.count) if any(mark in header for mark in "\t;,") else ""


def _row(recording: Recording, line: int, cells: dict[str, str], textual: set[str]) -> dict[str, object]:
    """Return the cells that are not empty. A word in a column of numbers is a fault; a column that begins with one is
    text."""
    row: dict[str, object] = {}
    for name, cell in cells.items():
        if cell.lower() in _EMPTY:
            continue
        if number(cell) is None and name not in rows.TIMES and name not in textual:
            if name in recording.columns:
                recording.faults.add(line, f"{name} is {cell!r}, which is no number")
            else:
                textual.add(name)
        row[name] = cell
    return row
