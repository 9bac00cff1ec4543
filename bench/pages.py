"""Makes tables of figures, and reads and writes the sections of docs/ that a bench fills."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS, BUILD = ROOT / "docs", ROOT / "build"


def make_table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table. A `|` in a cell would end the cell, and becomes a slash."""
    cells = [head, ["---"] * len(head), *([str(cell).replace("|", "/") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def read_rows(page: Path, marks: tuple[str, str]) -> dict[str, list[str]]:
    """Return the cells of each row of the table between two comments of a page, by the first cell."""
    section = page.read_text(encoding="utf-8").split(marks[0])[1].split(marks[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:]]
    return {cells[0]: cells for cells in rows}


def write_section(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace the text between two comments of a page. Raises ValueError if the page lacks them."""
    above, rest = page.read_text(encoding="utf-8").split(marks[0])
    _, below = rest.split(marks[1])
    page.write_text(f"{above}{marks[0]}\n\n{text}\n\n{marks[1]}{below}", encoding="utf-8")
