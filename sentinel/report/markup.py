"""Text from a run, made fit for HTML and SVG."""

from __future__ import annotations

import html

from sentinel.text import spell_controls


def escape(text: str, quote: bool = True) -> str:
    """As `html.escape`; and what a terminal or a browser obeys (ESC, marks that turn the direction of what follows) is
    spelled out."""
    return html.escape(spell_controls(text), quote)
