"""What the commands print: the only way to the terminal, so that nothing gets there that a terminal obeys."""

from __future__ import annotations

import click

from sentinel.text import spell_controls

_LONGEST = 2000
"""Characters of an error."""


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print. What a terminal obeys is spelled out: names of runs, layers and files may come from anybody."""
    click.echo(spell_controls(str(text)), err=err, nl=nl)


def plain(text: object) -> str:
    """An error's words: what a terminal obeys is spelled out, and what fills it is cut."""
    spelled = spell_controls(str(text))
    return spelled if len(spelled) <= _LONGEST else f"{spelled[: _LONGEST // 2]} ... {spelled[-_LONGEST // 2 :]}"
