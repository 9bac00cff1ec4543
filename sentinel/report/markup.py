"""Escapes text from a run for HTML and SVG."""

from __future__ import annotations

import html

from sentinel.text import spell_controls


def escape(text: str, quote: bool = True) -> str:
    """Escape as `html.escape` does, and spell out characters that a terminal or a browser obeys (ESC, marks that change
    the direction of text)."""
    return html.escape(spell_controls(text), quote)
