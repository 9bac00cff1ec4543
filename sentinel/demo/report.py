"""Prints the demo's text before and after the runs."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from sentinel.demo.course import Course
from sentinel.demo.outcome import DemoOutcome


def introduce(console: Console, course: Course) -> None:
    """Print what will happen, and the lines of the script or commands that make it happen, if there are any."""
    words = f"  fault: {course.fault}, seed {course.seed}"
    console.print(Text.assemble(("Sentinel demo", "bold"), words), soft_wrap=True)
    console.print(Text(course.introduction))
    code = Syntax(
        "\n".join(course.code), course.language, theme="ansi_dark", word_wrap=True, background_color="default"
    )
    console.print(Padding(code, (1, 2)) if course.code else "")


def conclude(console: Console, outcome: DemoOutcome, files: dict[str, Path]) -> None:
    """Print the comparison, the verdict, and the paths of the picture and the page."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for name, colour in outcome.columns:
        table.add_column(name, justify="right", style=colour, header_style=f"bold {colour}")
    for row in outcome.rows:
        table.add_row(*row)
    console.print(table)
    console.print(Text(outcome.verdict))
    console.print()
    for name, path in files.items():
        console.print(Text(f"{name:<8} {path}"), soft_wrap=True)
