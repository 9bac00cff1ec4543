"""Words for sentences: the first of many names (`a, b, c and 61 more`), ranks, counts, sizes.

The state of an incident: the values that programs compare, and the words for people.

Text from untrusted sources, made safe for a terminal and for other programs; and the one function that writes to a
terminal that other programs write to as well.
"""

from __future__ import annotations

import datetime
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TextIO


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that was most likely meant; empty where none is near."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`; where no known word is near, a list of all of them, if there are at most 12."""
    names = list(known)
    if near := find_nearest(word, names):
        return f"; did you mean {near!r}?"
    return "; there are: " + ", ".join(names) if len(names) <= 12 else ""


def join_names(names: Sequence[str], most: int, total: int = 0) -> str:
    """Return the first `most` names and how many more there are. `total`: the full count, where `names` is not
    complete."""
    total = max(total, len(names))
    return ", ".join(names[:most]) + (f" and {total - most} more" if total > most else "")


def name_nodes(nodes: Sequence[int]) -> str:
    """Return `node 3` or `nodes 0, 2, 5`; `all nodes` for an empty list."""
    if not nodes:
        return "all nodes"
    return f"node{'s' if len(nodes) != 1 else ''} {join_names([str(node) for node in nodes], 8)}"


def describe_node_state(node: Mapping[str, Any], *, stale: bool) -> str:
    """Return the state of a job's node in words, or for how long it has not been heard. `stale`: no coordinator is
    heard, so that the present state is not known."""
    seconds = f"{node['silent_seconds']:.0f} s"
    if node["state"] == "silent":
        return f"silent for {seconds}"
    return f"not heard of for {seconds}; was {node['state']}" if stale else str(node["state"])


_SHOWN_RANKS = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0 to 3`, `ranks 0, 2, 5` or `ranks 0, 2, ... and 54 more`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {join_names([str(rank) for rank in ranks], _SHOWN_RANKS)}"


def format_moment(when: float) -> str:
    """Return date and time of day in the local time zone; a dash for 0, where the time is not known."""
    return datetime.datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S") if when else "-"


def format_clock(when: float) -> str:
    """Return the local time of day, with the date if that is not today."""
    moment = datetime.datetime.fromtimestamp(when)
    return moment.strftime("%H:%M" if moment.date() == datetime.date.today() else "%b %d %H:%M")


def format_count(number: int, noun: str) -> str:
    """Return a count with its noun: `1 run`, `2 runs`, `12,400 steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units: `1.2 s`, `3 min 5 s`, `1 h 12 min`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    left, parts = round(seconds), list[str]()
    for name, size in _UNITS:
        if left >= size:
            parts.append(f"{left // size} {name}")
            left %= size
        elif parts:
            break
    return " ".join(parts[:2])


_SEVERITIES = ("critical", "warning", "info")
"""Severities, the worst first."""


def rank_severity(severity: str) -> int:
    """Return a number that is higher the worse the severity is; 0 for an unknown one."""
    return len(_SEVERITIES) - _SEVERITIES.index(severity) if severity in _SEVERITIES else 0


def describe_incidents(counts: Mapping[str, int], worst: str = "") -> str:
    """Return how many incidents there were by severity: `1 critical (LossSpike at step 40), 2 warnings`. `worst`
    describes one of the worst, for the parentheses."""
    found = [(name, counts[name]) for name in sorted(counts, key=rank_severity, reverse=True) if counts[name]]
    parts = [format_count(number, name) if name == "warning" else f"{number} {name}" for name, number in found]
    if parts and worst:
        parts[0] += f" ({worst})"
    return ", ".join(parts) or "no incidents"


def name_worst(alert: str, step: int, *, grew: bool) -> str:
    """Return words for the worst problem, named by its first incident. `grew`: that incident is less severe than what
    followed from it."""
    return f"{'begun by ' if grew else ''}{alert} at step {step:,}"


def name_reached(steps: int, step: int, *, cut: bool = False) -> str:
    """Return how far a run of `steps` steps came; the user numbers its last one `step`. `cut`: more steps may have
    followed."""
    if steps <= 0:
        return "without a step"
    if step == steps - 1:
        return "after " + ("at least " if cut else "") + format_count(steps, "step")
    return f"at step {step:,}" + (" or later" if cut else "")


def close_run(run: str, run_id: str, reached: str, *, seconds: float, how: str, found: str) -> str:
    """Return the line that is printed at the end of a run. `how` it ended, where that is worth mentioning; `found`: the
    incidents and what else came of it. `run_id`: empty where no history has the run."""
    ended = " ".join(filter(None, (f"run {run!r} ended", reached, f"in {format_duration(seconds)}")))
    return f"{ended}{how and f', {how}'}: {found}" + (f". Details: sentinel last {run_id}" if run_id else "")


def name_lost_steps(count: int) -> str:
    """Return words for steps missing from a history. `count` is an upper bound: a chunk that was given up may have been
    written in part."""
    return f"its history lacks up to {format_count(count, 'step')}"


def format_bytes(size: float) -> str:
    """Return a number of bytes in decimal units with three digits: `31.4 GB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 1e15 else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} bytes"


_COPIED = re.compile(r"`[^`]*`|(?<![\w.])[\w.]+\((?:[^()]|\([^()]*\))*\)")
"""Matches a command in backticks, or a call, whose arguments may contain calls."""
_HARD_SPACE = "\x00"
"""A placeholder that occurs in no text, as control characters are dropped or spelled out."""


def wrap_words(text: str, columns: int, most: int | None = None, *, begin: str = "", indent: str = "") -> list[str]:
    """Wrap `text` to lines of `columns` characters, broken between words; the first begins with `begin`, the others
    with `indent`. Text for copying stays whole: paths and long names, commands in backticks, and calls that fit into a
    line. If there are more than `most` lines, the last kept one ends in `...`."""
    room = columns - max(len(begin), len(indent))
    copied = [words for words in _COPIED.findall(text) if words.startswith("`") or len(words) <= room]
    for words in copied:
        text = text.replace(words, words.replace(" ", _HARD_SPACE))
    lines = textwrap.wrap(
        text, columns, initial_indent=begin, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        max_lines=most, placeholder=" ...",
    )  # fmt: skip
    return [line.replace(_HARD_SPACE, " ") for line in lines]


UNRESOLVED = "unresolved"
"""The state of an incident that fired and did not resolve before its run was over."""

_WORDS = {"rolled_back": "rolled back", UNRESOLVED: "until the end"}
_FORMER = {"rolled back": "rolled_back", "till the end": UNRESOLVED}
"""Names of states in histories that earlier versions wrote -> the present names."""


def in_words(state: str) -> str:
    """Return the state as it is written in a sentence or a table."""
    return _WORDS.get(state, state)


def present(state: str) -> str:
    """Return the present name of a state that was read from a file."""
    return _FORMER.get(state, state)


_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters (a terminal obeys ESC), marks that change the direction of text, line separators other than the
line feed, invisible tags, and lone surrogates, which UTF-8 cannot encode. Tab and line feed are not matched."""


def drop_controls(text: str) -> str:
    """Return `text` without control characters."""
    return _CONTROL.sub("", text)


def spell_controls(text: str) -> str:
    r"""Return `text` with each control character spelled out: ESC as `\x1b`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def spell_line(text: str) -> str:
    r"""Return `text` as one line, with control characters and line feeds spelled out."""
    return spell_controls(text).replace("\n", "\\n")


def write_lines(text: str, stream: TextIO | None) -> None:
    """Write `text` on lines of its own, even where a progress bar has left the cursor in the middle of a line. Control
    characters are spelled out. A closed stream is ignored."""
    try:
        if stream is not None:
            # One write: between two, another thread could write a line.
            stream.write(f"{_begin_line(stream)}{spell_controls(text)}\n")
            stream.flush()
    except (OSError, ValueError, AttributeError):
        pass


def _begin_line(stream: TextIO) -> str:
    """Return what moves a terminal's cursor to the beginning of a line without erasing anything and without querying
    its position: as many spaces as there are columns. From the first column they fill the line, and the cursor stays in
    it, as terminals wrap only before the next character; from any other they run into the next line."""
    if not stream.isatty():
        return ""
    return " " * os.get_terminal_size(stream.fileno()).columns + "\r"
