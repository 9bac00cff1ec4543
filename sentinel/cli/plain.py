"""What the commands print: the only way to the terminal, so that nothing gets there that a terminal obeys."""

from __future__ import annotations

import shutil

import click

from sentinel.text import spell_controls, wrap_words

_LONGEST = 2000
"""Characters of an error."""
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 100
"""Longer lines are hard to read, however wide the terminal."""


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print. What a terminal obeys is spelled out: names of runs, layers and files may come from anybody."""
    click.echo(spell_controls(str(text)), err=err, nl=nl)


def wrap_text(lead: str, text: str) -> list[str]:
    """Lines of `text` in a column of its own behind `lead`. What is to be copied stays whole."""
    columns = min(max(shutil.get_terminal_size().columns, _LEAST_COLUMNS), _MOST_COLUMNS)
    return wrap_words(text, columns, begin=lead, indent=" " * len(lead))


def plain(text: object) -> str:
    """An error's words: what a terminal obeys is spelled out, and what fills it is cut."""
    spelled = spell_controls(str(text))
    return spelled if len(spelled) <= _LONGEST else f"{spelled[: _LONGEST // 2]} ... {spelled[-_LONGEST // 2 :]}"
