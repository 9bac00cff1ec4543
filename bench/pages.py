"""Tables of figures, and the places in docs/ that a bench writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS, BUILD = ROOT / "docs", ROOT / "build"


def make_table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown. A bar in a cell would end the cell: a slash stands there."""
    cells = [head, ["---"] * len(head), *([str(cell).replace("|", "/") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def read_rows(page: Path, marks: tuple[str, str]) -> dict[str, list[str]]:
    """The cells of each row of the table between two comments of a page, by the first cell."""
    section = page.read_text(encoding="utf-8").split(marks[0])[1].split(marks[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:]]
    return {cells[0]: cells for cells in rows}


def write_section(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two comments of a page. Raises ValueError where they are not there."""
    above, rest = page.read_text(encoding="utf-8").split(marks[0])
    _, below = rest.split(marks[1])
    page.write_text(f"{above}{marks[0]}\n\n{text}\n\n{marks[1]}{below}", encoding="utf-8")
