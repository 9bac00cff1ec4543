"""Words of sentences: the first of many names (`a, b, c and 61 more`), ranks, counts, sizes.

How an incident stands: the values that programs compare, and the words for people.

Text from anybody, made fit for a terminal and for other people's programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def join_names(names: Sequence[str], most: int, total: int = 0) -> str:
    """The first `most` names, and how many more there are. `total`: how many there are, where `names` has not all."""
    total = max(total, len(names))
    return ", ".join(names[:most]) + (f" and {total - most} more" if total > most else "")


_SHOWN_RANKS = 8


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 3`, `ranks 0, 2, 5`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (" ..." if len(ranks) > _SHOWN_RANKS else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def format_count(number: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_bytes(size: float) -> str:
    """Bytes in decimal units, three digits: `31.4 GB`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(size) >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}" if abs(size) < 1e15 else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} bytes"


UNRESOLVED = "unresolved"
"""The state of what fired until its run was over."""

_WORDS = {"rolled_back": "rolled back", UNRESOLVED: "until the end"}
_FORMER = {"rolled back": "rolled_back", "till the end": UNRESOLVED}
"""As histories have it that were written before."""


def in_words(state: str) -> str:
    """The state as it stands in a sentence or a table."""
    return _WORDS.get(state, state)


def present(state: str) -> str:
    """The state as it is called now, of one that was read from a file."""
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
