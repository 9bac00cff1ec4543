"""The training terminal: the alert as one readable block, printed by rank 0's hook, at once.

It is no Receiver of the pipeline: it needs no outbox, because the rank that prints it remembers, and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sentinel import wire
from sentinel.config import settings as config
from sentinel.diagnose.case import Case
from sentinel.notify import Event, wording
from sentinel.notify.entry import digest
from sentinel.text import drop_controls, join_names, wrap_words

WIDTH = 79
"""Columns of a block: a terminal has 80 by default, and a wrapped frame is hard to read."""
LABEL = 8
LINES = 16
"""Most lines of a block, unless rows that are never cut take more: longer ones push training output off the screen."""
_WHOLE = ("follows", "where", "do", "to know", "more")
"""Rows that are never cut, because a part of them is useless, such as half a command."""
_SPARED = {"what": 2, "why": 2}
"""Lines by which a row may be longer than others before it is cut: a cause names its consequence at its end."""


class Terminal:
    """Sends each alert to rank 0 as text."""

    def __init__(self, send: Callable[[wire.Notice], None], severities: frozenset[str]) -> None:
        """`severities`: those of the alerts that are printed. `on_alert` gets all alerts."""
        self.severities = severities
        self._send = send

    def notify(self, event: Event, case: Case, *, quiet: bool = False, going_on: Sequence[str] = ()) -> None:
        """Print a block when a case fires, and a line when it is over; joining members go to `on_alert` alone. `quiet`:
        a line is enough, as the problem has its block; `going_on`: alerts of the same problem that still fire."""
        one_line = event != "fired" or quiet
        text = "" if event == "updated" else line(event, case, going_on) if one_line else block(case)
        again = f"/{digest(case)}" if event == "updated" else ""
        self._print(event, case, text, again)
        if event == "updated" and case.diagnosis.keeper and self.has_shown(case):  # found after the block was shown
            self._send(wire.Notice(id=f"{case.run_id}/{case.id}/keeper", text=name_keeper(case)))

    def show_separate(self, case: Case) -> None:
        """Print the block of a case that was shown as a consequence, but is none."""
        self._print("updated", case, block(case), "/separate")

    def has_shown(self, case: Case) -> bool:
        """Return whether a case was shown when it fired."""
        return case.told and not case.silenced and case.severity in self.severities

    def _print(self, event: Event, case: Case, text: str, again: str) -> None:
        identity = f"{case.run_id}/{case.id}/{event}{again}"
        shown = text if case.severity in self.severities else ""
        self._send(wire.Notice(id=identity, text=shown, alert={"event": event, **case.builtins()}))


def block(case: Case) -> str:
    """Return the block of a case: what, where, since when, why, what to do, and how to see the whole case."""
    follows = f"{case.parent}, an earlier alert of the same problem: see to it first" if case.parent else ""
    rows = [("what", case.summary), ("follows", follows), *wording.rows(case), ("more", wording.more(case))]
    title = f" SENTINEL {case.severity.upper()}  {case.alert}  {case.run}, step {case.step} "
    top = "\u250f" + drop_controls(title).center(WIDTH - 1, "\u2501")
    lines = [f"\u2503 {line}" for line in _lay_out([(label, drop_controls(text)) for label, text in rows if text])]
    return "\n".join([top, *lines, "\u2517" + "\u2501" * (WIDTH - 1)])


def line(event: Event, case: Case, going_on: Sequence[str] = ()) -> str:
    """Return a line about the end of an incident, or about one more incident of a problem."""
    if event == "fired":
        joins = f"with {case.parent or case.problem_id}"
        return f"[sentinel] {case.severity} {case.alert} at step {case.step}, {joins}: {drop_controls(case.summary)}"
    rest = f"; {join_names(list(going_on), 3)} still firing" if going_on else ""
    ended = wording.end(case, undone=event == "rolled_back")
    return f"[sentinel] {case.alert} (since step {case.first_step}): {ended}{rest}"


def name_keeper(case: Case) -> str:
    """Return a line that names what holds memory that is not released, which is known some steps after the alert."""
    found = case.diagnosis
    told = f"{found.keeper} keeps what each step makes; {found.remedy}"
    return f"[sentinel] {case.alert} (since step {case.first_step}): {drop_controls(told)}"


def _lay_out(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of all rows. If they are too many, the longest rows lose their ends; then `done` is left out."""
    heights = [len(_wrap(label, text)) for label, text in rows]
    while sum(heights) > LINES - 2:
        cut = [at for at, (label, _) in enumerate(rows) if label not in _WHOLE and heights[at] > (label != "done")]
        if not cut:
            break
        heights[max(cut, key=lambda at: (heights[at] - _SPARED.get(rows[at][0], 0), at))] -= 1
    for (label, text), height in zip(rows, heights, strict=True):
        yield from _wrap(label, text, height) if height else ()


def _wrap(label: str, text: str, most: int | None = None) -> list[str]:
    begin = f"{label:<{LABEL}}"
    if label == "more":  # a command
        return [begin + text]
    return wrap_words(text, WIDTH - 2, most, begin=begin, indent=" " * LABEL)


KIND = config.ReceiverKind(make=None)


def list_shown_severities(settings: config.Settings) -> frozenset[str]:
    """Return the severities that the training terminal shows: all, unless the settings name some."""
    terminal = next((named for named in settings.receivers if config.find_kind(named.type) is KIND), None)
    return frozenset(terminal.severities if terminal else config.SEVERITIES)
