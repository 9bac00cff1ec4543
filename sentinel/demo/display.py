"""Shows the runs while they train: a live line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sentinel.demo.record import LossCurve
from sentinel.demo.story import State

PLAIN_LINES = 8
"""Lines that a run prints on its way without a terminal, at equal distances of its steps."""
BAR_WIDTH = 24
_STYLES: dict[State, str] = {
    "starting": "dim",
    "training": "",
    "bad batches": "yellow",
    "wrecked": "bold red",
    "NaN": "bold red",
    "rolled back": "bold cyan",
    "recovered": "bold green",
    "faulty": "yellow",
    "alert": "bold red",
    "stuck": "bold red",
    "ended": "bold red",
    "done": "bold green",
    "started again": "bold cyan",
}


class Row(NamedTuple):
    """The present state of one run."""

    name: str
    colour: str
    curve: LossCurve
    state: State
    shown: str
    """The most important number, with its name: `loss  2.34`."""


class Display(Protocol):
    """Shows the progress of a demo. A context manager."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...
    def show_line(self, line: str) -> None:
        """Print a line that stays."""

    def progress(self, *rows: Row) -> None:
        """Show how far the runs are."""


class TerminalDisplay:
    """Live lines at the bottom of a terminal, with the output of the watched runs above them."""

    def __init__(self, console: Console, steps: int) -> None:
        self._steps = steps
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> TerminalDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show_line(self, line: str) -> None:
        self._live.console.print(Text(line))

    def progress(self, *rows: Row) -> None:
        table = Table.grid(padding=(0, 2))
        for row in rows:
            table.add_row(*self._cells(row))
        self._live.update(Group(Text(), table), refresh=True)

    def _cells(self, row: Row) -> tuple[Text | ProgressBar, ...]:
        step = row.curve.steps[-1] + 1 if row.curve.steps else 0
        bar = ProgressBar(
            total=self._steps, completed=step, width=BAR_WIDTH, complete_style=row.colour, finished_style=row.colour
        )
        return (
            Text(row.name, style=f"bold {row.colour}"), bar, Text(f"step {step:>3}/{self._steps}"), Text(row.shown),
            Text(row.state, style=_STYLES[row.state]),
        )  # fmt: skip


class PlainDisplay:
    """Plain lines, as for a log: the output of the watched run, and the state of the runs, at some steps and when it
    changes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._shown: dict[str, tuple[int, State]] = {}

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show_line(self, line: str) -> None:
        self._print(line)

    def progress(self, *rows: Row) -> None:
        for row in rows:
            step = row.curve.steps[-1] if row.curve.steps else 0
            now = step * PLAIN_LINES // self._steps, row.state
            if row.curve.steps and self._shown.get(row.name) != now:
                self._shown[row.name] = now
                self._print(f"{row.name:<16}  step {step:>4}/{self._steps}  {row.shown}  {row.state}")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
