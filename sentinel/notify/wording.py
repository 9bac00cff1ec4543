"""The words that describe a case to people: the same on the terminal, in Slack and on a pager."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from sentinel.diagnose.case import Case, CaseMember
from sentinel.diagnose.signs import Sign
from sentinel.notify import Message
from sentinel.text import drop_controls, join_names, name_nodes, name_ranks


def rows(case: Case) -> list[tuple[str, str]]:
    """Return (label, text): where, since when, why, what to do, what was done. The summary stands before them."""
    done = [("done", done) for done in case.done]
    found = [
        ("where", where(case)),
        ("since", describe_first_sign(case)),
        ("why", why(case)),
        ("do", case.diagnosis.remedy),
        ("to know", _ask(case)),
        *done,
    ]
    return [(label, text) for label, text in found if text]


def runbook(case: Case, message: Message) -> str:
    """Return the place of a case's runbook section: an address if the settings have one, else the repository's file."""
    return message.origin.link_section(case.runbook) or (f"docs/runbook.md#{case.runbook}" if case.runbook else "")


def links(message: Message) -> list[tuple[str, str]]:
    """Return (label, address) of the settings' links to the run."""
    origin = message.origin
    found = [("dashboard", origin.dashboard), ("page", origin.page), ("report", origin.report)]
    return [(label, link) for label, link in found if link]


def place(message: Message) -> list[tuple[str, str]]:
    """Return (label, text): the run's host and its user."""
    found = [("host", message.origin.host), ("user", message.origin.user)]
    return [(label, text) for label, text in found if text]


def notes(message: Message) -> list[tuple[str, str]]:
    """Return (label, text): alerts that wait for the rate limit, and alerts that could not be sent."""
    held = join_names(list(message.held), 5) + " wait for the rate limit; sentinel incidents shows them"
    lost = "could not be told: " + join_names(list(message.lost), 5)
    return [*([("held", held)] if message.held else []), *([("lost", lost)] if message.lost else [])]


def why(case: Case) -> str:
    """Return the diagnosis, or what it lacks; empty where an alert has no known causes, as with users' rules."""
    diagnosis = case.diagnosis
    if diagnosis.confidence != "none":
        return f"{diagnosis.cause} (confidence: {diagnosis.confidence})"
    return f"{diagnosis.cause}; missing: {'; '.join(diagnosis.missing)}" if diagnosis.missing else ""


def _ask(case: Case) -> str:
    """Return the command that provides what a diagnosis lacks; empty where it lacks nothing."""
    diagnosis = case.diagnosis
    return diagnosis.command if diagnosis.confidence == "none" and diagnosis.missing else ""


def more(case: Case) -> str:
    """Return the command that shows the whole case."""
    return f"sentinel incidents show {case.id} --run {case.run_id}"


def describe_member(case: Case) -> str:
    """Return a line about one of several incidents of a problem."""
    state = "" if case.state == "firing" else f", {end(case, undone=case.state == 'rolled_back')}"
    return f"{case.alert} ({case.severity}, since step {case.first_step}{state})"


def end(case: Case, *, undone: bool = False) -> str:
    """Return how a case ended. `undone`: by a rollback."""
    by_word = case.done and (undone or case.resolved_step is None)
    return (
        case.done[-1] if by_word else f"over at step {case.resolved_step}" + (f": {case.leaves}" if case.leaves else "")
    )


def where(case: Case) -> str:
    """Return the ranks or layers of a case; in a job over several nodes also their nodes."""
    nodes = list_nodes(case)
    apart = [member for member in case.members if member.scope != "run"]
    if nodes and not apart and not case.diagnosis.layers and not case.layers:
        return name_nodes(nodes)
    return _name_members(case, apart) + (f", on {name_nodes(nodes)}" if nodes else "")


def list_nodes(case: Case) -> list[int]:
    """Return the nodes of a case in a job over several nodes, as far as its members name them."""
    return sorted({int(member.node) for member in case.members if member.node.isdecimal()})


def _name_members(case: Case, apart: Sequence[CaseMember]) -> str:
    if apart:
        names = list(dict.fromkeys(member.name for member in apart))
        if apart[0].node and apart[0].scope == "rank" and all(map(str.isdecimal, names)):
            return name_ranks(sorted(map(int, names)))
        return f"{apart[0].scope} {join_names(names, 3)}"
    if named := case.diagnosis.layers:
        return ("parameter " if len(named) == 1 else "parameters ") + join_names(named, 3)
    if case.layers:
        how = "are not finite" if case.layers[0].nonfinite else "grew most"
        return f"gradients {how} in " + join_names([layer.name for layer in case.layers], 3, case.grown)
    return "the run as a whole" if case.members else "not known"


def describe_first_sign(case: Case) -> str:
    """Return the first step, and the signals that moved first."""
    if not case.signs:
        return f"step {case.first_step}"
    onsets = [
        " and ".join(f"{sign.signal} ({sign.value:.3g}{_usually(sign)})" for sign in signs) + f" at step {seq}"
        for seq, signs in itertools.groupby(case.signs, key=lambda sign: sign.seq)
    ]
    return f"step {case.first_step}, first sign " + ", then ".join(onsets)


def _usually(sign: Sign) -> str:
    return "" if math.isnan(sign.usual) else f", usually {sign.usual:.3g}"


def cut(text: str, limit: int) -> str:
    """Return `text` without control characters, in at most `limit` UTF-16 units, as JavaScript and Java count; an
    ellipsis where it was longer."""
    units = drop_controls(text).encode("utf-16-le")
    if len(units) <= 2 * limit:
        return units.decode("utf-16-le")
    return units[: 2 * (limit - 1)].decode("utf-16-le", "ignore") + "\u2026"  # half a surrogate pair is dropped
