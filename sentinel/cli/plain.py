"""Words for a terminal that may come from anybody."""

from __future__ import annotations

_LONGEST = 2000
"""Characters of an error."""


def plain(text: object) -> str:
    """What a terminal obeys is spelled out, and what fills it is cut."""
    spelled = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))
    return spelled if len(spelled) <= _LONGEST else f"{spelled[: _LONGEST // 2]} ... {spelled[-_LONGEST // 2 :]}"
