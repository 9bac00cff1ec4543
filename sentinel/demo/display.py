"""What the terminal shows while the two runs train: two live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sentinel.demo import story
from sentinel.demo.record import Curve
from sentinel.demo.story import State

PLAIN_STEPS = 100
"""Without a terminal: a line each time a run has done so many steps."""
BAR_WIDTH = 24
_STYLES: dict[State, str] = {
    "starting": "dim",
    "training": "",
    "bad batches": "yellow",
    "wrecked": "bold red",
    "NaN": "bold red",
    "rolled back": "bold cyan",
    "recovered": "bold green",
}


class Display(Protocol):
    """Where the demo shows how it goes. A context manager."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *_: object) -> None: ...
    def said(self, line: str) -> None:
        """A line that the watched run printed on stderr."""

    def progress(self, watched: tuple[Curve, State], alone: tuple[Curve, State]) -> None:
        """How far the runs are."""


class Terminal:
    """Two lines that stay at the bottom, with all that the watched run says above them."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._live = Live(console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Terminal:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def said(self, line: str) -> None:
        self._live.console.print(Text(line))

    def progress(self, watched: tuple[Curve, State], alone: tuple[Curve, State]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_row(*self._row(story.WATCHED, story.WATCHED_COLOUR, *watched))
        table.add_row(*self._row(story.ALONE, story.ALONE_COLOUR, *alone))
        self._live.update(Group(Text(), table), refresh=True)

    def _row(self, name: str, colour: str, curve: Curve, state: State) -> tuple[Text | ProgressBar, ...]:
        step = curve.steps[-1] + 1 if curve.steps else 0
        loss = f"loss {story.number(curve.losses[-1]):>5}" if curve.steps else "loss     -"
        bar = ProgressBar(
            total=self._steps, completed=step, width=BAR_WIDTH, complete_style=colour, finished_style=colour
        )
        return (
            Text(name, style=f"bold {colour}"), bar, Text(f"step {step:>3}/{self._steps}"), Text(loss),
            Text(state, style=_STYLES[state]),
        )  # fmt: skip


class Lines:
    """For a log, or for nobody: what the watched run says, and how the runs are every `PLAIN_STEPS` steps or when
    it changes."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._shown: dict[str, tuple[int, State]] = {}

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def said(self, line: str) -> None:
        self._print(line)

    def progress(self, watched: tuple[Curve, State], alone: tuple[Curve, State]) -> None:
        for name, (curve, state) in ((story.WATCHED, watched), (story.ALONE, alone)):
            step = curve.steps[-1] if curve.steps else 0
            now = step // PLAIN_STEPS, state
            if curve.steps and self._shown.get(name) != now:
                self._shown[name] = now
                self._print(f"{name:<16}  step {step:>4}/{self._steps}  loss {story.number(curve.losses[-1])}  {state}")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
