"""Words of sentences: the first of many names (`a, b, c and 61 more`), ranks, counts, sizes.

How an incident stands: the values that programs compare, and the words for people.

Text from anybody, made fit for a terminal and for other people's programs; and the one way to write on a terminal that
others write on, too.
"""

from __future__ import annotations

import datetime
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TextIO


def find_nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was most likely meant; empty where none is near."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or what there is where nothing is near."""
    names = list(known)
    if near := find_nearest(word, names):
        return f"; did you mean {near!r}?"
    return "; there are: " + ", ".join(names) if len(names) <= 12 else ""


def join_names(names: Sequence[str], most: int, total: int = 0) -> str:
    """The first `most` names, and how many more there are. `total`: how many there are, where `names` has not all."""
    total = max(total, len(names))
    return ", ".join(names[:most]) + (f" and {total - most} more" if total > most else "")


def name_nodes(nodes: Sequence[int]) -> str:
    """`node 3`, `nodes 0, 2, 5`; `all nodes` where none is named."""
    if not nodes:
        return "all nodes"
    return f"node{'s' if len(nodes) != 1 else ''} {join_names([str(node) for node in nodes], 8)}"


_SHOWN_RANKS = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2, 5`, `ranks 0, 2, ... and 54 more`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {join_names([str(rank) for rank in ranks], _SHOWN_RANKS)}"


def format_moment(when: float) -> str:
    """Date and time of day here; a dash where it is not known."""
    return datetime.datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S") if when else "-"


def format_clock(when: float) -> str:
    """Time of day here, with the date where that is not today."""
    moment = datetime.datetime.fromtimestamp(when)
    return moment.strftime("%H:%M" if moment.date() == datetime.date.today() else "%b %d %H:%M")


def format_count(number: int, noun: str) -> str:
    """`1 run`, `2 runs`, `12,400 steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def format_duration(seconds: float) -> str:
    """In the two largest units: `1.2 s`, `3 min 5 s`, `1 h 12 min`."""
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
"""The worst first."""


def rank_severity(severity: str) -> int:
    """The higher the worse."""
    return len(_SEVERITIES) - _SEVERITIES.index(severity) if severity in _SEVERITIES else 0


def describe_incidents(counts: Mapping[str, int], worst: str = "") -> str:
    """How many there were by severity: `1 critical (LossSpike at step 40), 2 warnings`. `worst`: one of the worst."""
    found = [(name, counts[name]) for name in sorted(counts, key=rank_severity, reverse=True) if counts[name]]
    parts = [format_count(number, name) if name == "warning" else f"{number} {name}" for name, number in found]
    if parts and worst:
        parts[0] += f" ({worst})"
    return ", ".join(parts) or "no incidents"


def name_worst(alert: str, step: int, *, grew: bool) -> str:
    """The worst problem, by the incident that it began with. `grew`: that one is less severe than what came of it."""
    return f"{'begun by ' if grew else ''}{alert} at step {step:,}"


def name_reached(steps: int, step: int, *, cut: bool = False) -> str:
    """How far a run of so many steps came, the last of which the user numbers `step`. `cut`: that is known to us."""
    if steps <= 0:
        return "without a step"
    if step == steps - 1:
        return "after " + ("at least " if cut else "") + format_count(steps, "step")
    return f"at step {step:,}" + (" or later" if cut else "")


def close_run(run: str, run_id: str, reached: str, *, seconds: float, how: str, found: str) -> str:
    """The line at the end of a run. `how` it ended, where that is worth a word; `found`: what came of it. `run_id`:
    empty where no history has it."""
    ended = " ".join(filter(None, (f"run {run!r} ended", reached, f"in {format_duration(seconds)}")))
    return f"{ended}{how and f', {how}'}: {found}" + (f". Details: sentinel last {run_id}" if run_id else "")


def name_lost_steps(count: int) -> str:
    """That a history lacks steps: a chunk that was given up may have been in it in part."""
    return f"its history lacks up to {format_count(count, 'step')}"


def format_bytes(size: float) -> str:
    """Bytes in decimal units, three digits: `31.4 GB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 1e15 else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} bytes"


_COPIED = re.compile(r"`[^`]*`|(?<![\w.])[\w.]+\((?:[^()]|\([^()]*\))*\)")
"""A command in backticks, or a call, whose arguments may have calls."""
_HARD_SPACE = "\x00"
"""In no text, whose controls are dropped or spelled out."""


def wrap_words(text: str, columns: int, most: int | None = None, *, begin: str = "", indent: str = "") -> list[str]:
    """Lines of so many columns, broken between words; the first after `begin`, the others after `indent`. What is to be
    copied stays whole: paths and long names, commands in backticks, and calls that fit into a line. Of more than `most`
    lines the last ends in `...`."""
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
"""The state of what fired until its run was over."""

_WORDS = {"rolled_back": "rolled back", UNRESOLVED: "until the end"}
_FORMER = {"rolled back": "rolled_back", "till the end": UNRESOLVED}
"""As histories have it that were written before."""


def in_words(state: str) -> str:
    """The state as it stands in a sentence or a table."""
    return _WORDS.get(state, state)


def present(state: str) -> str:
    """The present name of a state that was read from a file."""
    return _FORMER.get(state, state)


_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters (a terminal obeys ESC), marks that turn the direction of what follows, separators of lines that
are no line feed, invisible tags, and lone surrogates, which UTF-8 cannot carry. Tab and line feed stay."""


def drop_controls(text: str) -> str:
    """`text` without them."""
    return _CONTROL.sub("", text)


def spell_controls(text: str) -> str:
    r"""`text` with each of them spelled out: ESC as `\x1b`."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def spell_line(text: str) -> str:
    r"""The same for what is to stay one line: a line feed is spelled out, too."""
    return spell_controls(text).replace("\n", "\\n")


def write_lines(text: str, stream: TextIO | None) -> None:
    """Write `text` on lines of its own, also where a progress bar has left the cursor in the middle of one. What a
    terminal obeys is spelled out. A stream that is closed is no reason to fail."""
    try:
        if stream is not None:
            # One write: between two another thread's line may come.
            stream.write(f"{_begin_line(stream)}{spell_controls(text)}\n")
            stream.flush()
    except (OSError, ValueError, AttributeError):
        pass


def _begin_line(stream: TextIO) -> str:
    """What moves a terminal's cursor to the beginning of a line and erases nothing, without a look where it is: as many
    spaces as there are columns. From the first column they fill the line, and the cursor stays in it, as terminals wrap
    only before the next character; from any other they run into the next one."""
    if not stream.isatty():
        return ""
    return " " * os.get_terminal_size(stream.fileno()).columns + "\r"
