"""Options that most commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sentinel.config import settings

_F = TypeVar("_F", bound=Callable[..., Any])


def json_option(text: str = "Print JSON instead of text.") -> Callable[[_F], _F]:
    """Return the option `--json`, passed as `as_json`. `text`: its help, where it means something else."""
    return click.option("--json", "as_json", is_flag=True, help=text)


rules_option = click.option(
    "--rules",
    "paths",
    type=click.Path(path_type=Path),
    multiple=True,
    envvar="SENTINEL_RULES",
    help="Rule file or folder beside the stock rules; repeat. A rule of the same name replaces the stock one.",
)


def parse_duration(ctx: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Return the seconds of a duration such as `14d`; callback of options. Raises click.BadParameter."""
    try:
        return None if text is None else settings.duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
