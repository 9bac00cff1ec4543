"""What the demo prints before and after the runs."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from sentinel.demo import story
from sentinel.demo.drive import Plan
from sentinel.demo.record import Record
from sentinel.demo.trainee import SCRIPT


def introduce(console: Console, plan: Plan) -> None:
    """What will happen, and the lines of the script that make it happen."""
    damage = plan.damage
    console.print(Text.assemble(("Sentinel demo", "bold"), f"  fault: {plan.fault}, seed {plan.seed}"), soft_wrap=True)
    console.print(
        Text(
            "A small GPT learns the text of Python's standard library, twice side by side: same script, same seed, "
            f"same data. Batches {damage.first} to {damage.last} are {damage.description}. One of them is watched:"
        )
    )
    lines = [line.strip() for line in SCRIPT.read_text().splitlines() if "sentinel." in line and "=" in line]
    code = Syntax(
        "\n".join(["import sentinel", *lines]), "python", theme="ansi_dark", word_wrap=True, background_color="default"
    )
    console.print(Padding(code, (1, 2)))


def conclude(console: Console, record: Record, files: dict[str, Path]) -> None:
    """The comparison, the verdict, and where the picture and the page are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column(
        story.WATCHED, justify="right", style=story.WATCHED_COLOUR, header_style=f"bold {story.WATCHED_COLOUR}"
    )
    table.add_column(story.ALONE, justify="right", style=story.ALONE_COLOUR, header_style=f"bold {story.ALONE_COLOUR}")
    for row in story.comparison(record):
        table.add_row(*row)
    console.print(table)
    console.print(Text(story.verdict(record)))
    console.print()
    for name, path in files.items():
        console.print(Text(f"{name:<8} {path}"), soft_wrap=True)
