"""`sentinel rules export`: convert rules for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from sentinel.cli.options import json_option, rules_option
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError
from sentinel.rulebook import loader


@click.group()
def export() -> None:
    """Convert rules for another program.

    \b
    Example:  sentinel rules export prometheus > sentinel-rules.yaml
    """


@export.command()
@rules_option
@json_option("Print JSON, which Prometheus reads as well; it has no comments.")
def prometheus(paths: tuple[Path, ...], as_json: bool) -> None:
    """Write alerting rules for Prometheus.

    Rules whose condition Prometheus can evaluate are translated. The others are named in comments, with the reason: one
    rule, SentinelIncident, passes on what the daemon finds. A further group watches Sentinel itself.

    Exit code 0; 2: a mistake in a rule file.

    \b
    Example:  sentinel rules export prometheus > sentinel-rules.yaml
              promtool check rules sentinel-rules.yaml
    """
    from sentinel.prometheus.alerting_rules import alerting_rules

    book = loader.load(paths)
    if book.notes:
        raise ConfigError("; ".join(book.notes).removeprefix("rules not loaded: "))
    echo(alerting_rules(book.rules, as_json=as_json), nl=False)
