"""Reads comma-, tab- or semicolon-separated values with a header: Lightning's metrics.csv, W&B's and TensorBoard's CSV.

Lightning writes one row for the training metrics of a step and another for its validation metrics, and leaves the other
cells empty: rows of one step are joined, and an empty cell is no sample.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from sentinel.toolkit.logs import rows
from sentinel.toolkit.logs.recording import Recording, number
from sentinel.toolkit.logs.text import lines

NAME = "CSV"

_EMPTY = frozenset({"", "none", "null", "n/a", "na", "-"})


def recognise(path: Path, head: bytes) -> bool:
    """Whether a line of names is followed by a line of as many cells, with a number among them."""
    first, *others = [line for line in head.decode("utf-8-sig", "replace").splitlines() if line.strip()][:2] or [""]
    delimiter = _delimiter(first)
    if not delimiter or not others:
        return False
    names, cells = (next(csv.reader([line], delimiter=delimiter)) for line in (first, others[0]))
    named = all(number(name) is None for name in names) and len({*names}) == len(names)
    return named and len(names) == len(cells) and any(number(cell) is not None for cell in cells)


def read(path: Path) -> Recording:
    """Return all rows of a file."""
    recording = Recording(path, NAME)
    header: list[str] = []
    textual: set[str] = set()
    for count, cells in _cells(path):
        if not header:
            header = cells
        elif cells == header:
            continue  # a run that was started again wrote the header again
        elif len(cells) != len(header):
            recording.faults.add(count, f"{len(cells)} cells, and the header has {len(header)}")
        else:
            rows.take(recording, count, _row(recording, count, dict(zip(header, cells, strict=True)), textual))
    return recording


def _cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    delimiter = ""
    for count, line in lines(path):
        if line.strip() and not line.startswith("#"):
            delimiter = delimiter or _delimiter(line) or ","
            yield count, [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]


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
