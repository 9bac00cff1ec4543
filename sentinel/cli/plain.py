"""The commands' only way to print, so that no control characters reach the terminal."""

from __future__ import annotations

import shutil

import click

from sentinel.text import spell_controls, wrap_words

_LONGEST = 2000
"""Most characters of an error."""
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 100
"""Bounds of a line's columns: longer lines are hard to read, however wide the terminal."""


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print. Control characters are spelled out: names of runs, layers and files may come from anyone."""
    click.echo(spell_controls(str(text)), err=err, nl=nl)


def wrap_text(lead: str, text: str) -> list[str]:
    """Return the lines of `text` in a column of its own behind `lead`. Text to be copied, as a command, stays whole."""
    columns = min(max(shutil.get_terminal_size().columns, _LEAST_COLUMNS), _MOST_COLUMNS)
    return wrap_words(text, columns, begin=lead, indent=" " * len(lead))


def plain(text: object) -> str:
    """Return an error's text with control characters spelled out, and its middle cut out where it is too long."""
    spelled = spell_controls(str(text))
    return spelled if len(spelled) <= _LONGEST else f"{spelled[: _LONGEST // 2]} ... {spelled[-_LONGEST // 2 :]}"
