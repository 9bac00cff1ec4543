"""The training terminal: the alert as one readable block, printed by rank 0's hook, at once.

No Receiver of the pipeline: it has no outbox, because the rank that prints it remembers, and nothing to wait for.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

from sentinel import wire
from sentinel.config import settings as config
from sentinel.diagnose.case import Case
from sentinel.notify import Event, wording
from sentinel.text import drop_controls, join_names

WIDTH = 79
"""Columns: a terminal has 80 by default, and a wrapped frame is hard to read."""
LABEL = 8
LINES = 12
"""Of a block: more would push the training's own lines off the screen."""
_SPARED = 2
"""Lines by which summary and cause may be longer than another row before they are cut."""
_QUOTED = re.compile("`[^`]*`")
_HARD_SPACE, _CUT = "\x00", " ..."
"""The first is in no text, whose controls are dropped."""


class Terminal:
    """Sends each alert to rank 0 as text."""

    def __init__(self, send: Callable[[wire.Notice], None], severities: frozenset[str]) -> None:
        """`severities`: of the alerts that are printed. `on_alert` gets all."""
        self.severities = severities
        self._send = send

    def notify(self, event: Event, case: Case, *, quiet: bool = False, going_on: Sequence[str] = ()) -> None:
        """One block when it fires, one line when it is over; who joins is for `on_alert` alone. `quiet`: a line
        will do, as the problem has its block; `going_on`: alerts on the same problem that still fire."""
        one_line = event != "fired" or quiet
        text = "" if event == "updated" else line(event, case, going_on) if one_line else block(case)
        again = f"/{len(case.members)}.{len(case.done)}.{case.parent}" if event == "updated" else ""
        self._print(event, case, text, again)
        if event == "updated" and case.diagnosis.keeper and self.has_shown(case):  # the block came before the count
            self._send(wire.Notice(id=f"{case.run_id}/{case.id}/keeper", text=name_keeper(case)))

    def show_separate(self, case: Case) -> None:
        """What was shown as a consequence is none: its block."""
        self._print("updated", case, block(case), "/separate")

    def has_shown(self, case: Case) -> bool:
        """Whether it was shown when it fired."""
        return case.told and not case.silenced and case.severity in self.severities

    def _print(self, event: Event, case: Case, text: str, again: str) -> None:
        identity = f"{case.run_id}/{case.id}/{event}{again}"
        shown = text if case.severity in self.severities else ""
        self._send(wire.Notice(id=identity, text=shown, alert={"event": event, **case.builtins()}))


def block(case: Case) -> str:
    """What, where, since when, why, what to do, and where the whole case is: at most `LINES`."""
    rows = [("what", case.summary), *wording.rows(case), ("more", wording.more(case))]
    title = f" SENTINEL {case.severity.upper()}  {case.alert}  {case.run}, step {case.step} "
    top = "\u250f" + drop_controls(title).center(WIDTH - 1, "\u2501")
    body = _shorten([_row(label, text) for label, text in rows if text])
    lines = [f"\u2503 {line}".replace(_HARD_SPACE, " ") for row in body for line in row]
    return "\n".join([top, *lines, "\u2517" + "\u2501" * (WIDTH - 1)])


def line(event: Event, case: Case, going_on: Sequence[str] = ()) -> str:
    """The end of an incident, or one more of a problem."""
    if event == "fired":
        joins = f"with {case.parent or case.problem_id}"
        return f"[sentinel] {case.severity} {case.alert} at step {case.step}, {joins}: {drop_controls(case.summary)}"
    rest = f"; {join_names(list(going_on), 3)} still firing" if going_on else ""
    ended = wording.end(case, undone=event == "rolled_back")
    return f"[sentinel] {case.alert} (since step {case.first_step}): {ended}{rest}"


def name_keeper(case: Case) -> str:
    """Who holds memory that is not given back, which is known some steps after the alert."""
    found = case.diagnosis
    told = f"{found.keeper} keeps what each step makes; {found.remedy}"
    return f"[sentinel] {case.alert} (since step {case.first_step}): {drop_controls(told)}"


def _row(label: str, text: str) -> list[str]:
    """Its lines. Paths, commands and what else stands in backticks stay whole, to be copied."""
    whole = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", _HARD_SPACE), drop_controls(text))
    if label == "more":  # a command
        whole = whole.replace(" ", _HARD_SPACE)
    wrapped = textwrap.wrap(whole, WIDTH - LABEL - 3, break_long_words=False, break_on_hyphens=False) or [""]
    lead = [label, *[""] * (len(wrapped) - 1)]
    return [f"{name:<{LABEL}}{part}" for name, part in zip(lead, wrapped, strict=True)]


def _shorten(rows: list[list[str]]) -> list[list[str]]:
    """The longest lose their ends, until all fit; `more`, the last, has the whole case. The cause says at its end what
    comes of it, and is cut after the others; the summary, which is `what`, last."""
    while sum(map(len, rows)) > LINES - 2:
        longest = max(rows[1:-1] + rows[:1], key=lambda row: len(row) - _SPARED * row[0].startswith(("what ", "why ")))
        if len(longest) == 1:
            del rows[-2]
        else:
            del longest[-1]
            end = longest[-1].removesuffix(_CUT)
            longest[-1] = (end if len(end) + len(_CUT) < WIDTH - 2 else end.rpartition(" ")[0]) + _CUT
    return rows


KIND = config.ReceiverKind(make=None)


def list_shown_severities(settings: config.Settings) -> frozenset[str]:
    """Severities that the training terminal shows: all, unless the settings say else."""
    terminal = next((named for named in settings.receivers if config.find_kind(named.type) is KIND), None)
    return frozenset(terminal.severities if terminal else config.SEVERITIES)
