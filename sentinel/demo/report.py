"""What the demo prints before and after the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from sentinel.demo import story, twinstory
from sentinel.demo.drive import DemoPlan
from sentinel.demo.record import DemoRecord
from sentinel.demo.trainee import SCRIPT
from sentinel.demo.twins import FAULTY, HEALTHY, Fault, Twins


def introduce(console: Console, plan: DemoPlan) -> None:
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


def introduce_twins(console: Console, fault: Fault, seed: int, steps: int) -> None:
    """What will happen."""
    console.print(Text.assemble(("Sentinel demo", "bold"), f"  fault: {fault}, seed {seed}"), soft_wrap=True)
    console.print(Text(twinstory.setting(fault, seed, steps) + " Sentinel watches both."))
    console.print()


def conclude(console: Console, record: DemoRecord, files: dict[str, Path]) -> None:
    """The comparison, the verdict, and where the picture and the page are."""
    columns = ((story.WATCHED, story.WATCHED_COLOUR), (story.ALONE, story.ALONE_COLOUR))
    _conclude(console, columns, story.comparison(record), story.verdict(record), files)


def conclude_twins(console: Console, twins: Twins, files: dict[str, Path]) -> None:
    """The same of a fault and its healthy twin."""
    columns = ((FAULTY, story.ALONE_COLOUR), (HEALTHY, story.WATCHED_COLOUR))
    _conclude(console, columns, twinstory.comparison(twins), twinstory.verdict(twins), files)


def _conclude(
    console: Console,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[tuple[str, str, str]],
    verdict: str,
    files: dict[str, Path],
) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for name, colour in columns:
        table.add_column(name, justify="right", style=colour, header_style=f"bold {colour}")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(Text(verdict))
    console.print()
    for name, path in files.items():
        console.print(Text(f"{name:<8} {path}"), soft_wrap=True)
