"""The training terminal: the alert as one readable block, printed by rank 0's hook, at once.

No Receiver of the pipeline: it has no outbox, because the rank that prints it remembers, and nothing to wait for.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from sentinel import wire
from sentinel.diagnose.case import Case
from sentinel.notify import Event, wording
from sentinel.notify.text import plain

WIDTH = 79
"""Columns: a terminal that nobody widened has 80, and a wrapped frame is hard to read."""
LABEL = 8


class Terminal:
    """Sends each alert to rank 0 as text."""

    name = "terminal"

    def __init__(self, send: Callable[[wire.Notice], None], severities: frozenset[str]) -> None:
        """`severities`: of the alerts that are printed. `on_alert` gets all."""
        self.severities = severities
        self._send = send

    def notify(self, event: Event, case: Case) -> None:
        """One block when it fires, one line when it is over; who joins is for `on_alert` alone."""
        text = "" if event == "updated" else block(case) if event == "fired" else line(event, case)
        if case.severity not in self.severities:
            text = ""
        again = f"/{len(case.members)}.{len(case.done)}" if event == "updated" else ""
        identity = f"{case.run_id}/{case.id}/{event}{again}"
        self._send(wire.Notice(id=identity, text=text, alert={"event": event, **case.builtins()}))


def block(case: Case) -> str:
    """What, where, since when, why, what to do, and where the whole case is."""
    rows = [("what", case.summary), *wording.rows(case), ("more", wording.more(case))]
    title = f" SENTINEL {case.severity.upper()}  {case.alert}  {case.run}, step {case.step} "
    top = "\u250f" + plain(title).center(WIDTH - 1, "\u2501")
    body = [_row(label, text) for label, text in rows if text]
    return "\n".join([top, *body, "\u2517" + "\u2501" * (WIDTH - 1)])


def line(event: Event, case: Case) -> str:
    """The end of an incident."""
    return f"[sentinel] {case.alert} (since step {case.first_step}): {wording.end(case, undone=event == 'rolled_back')}"


def _row(label: str, text: str) -> str:
    wrapped = textwrap.wrap(plain(text), WIDTH - LABEL - 3, break_long_words=False) or [""]
    lead = [label, *[""] * (len(wrapped) - 1)]
    return "\n".join(f"\u2503 {name:<{LABEL}}{part}" for name, part in zip(lead, wrapped, strict=True))
