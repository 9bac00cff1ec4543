"""`sentinel grafana`: dashboards, onto a Grafana server or into files."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec

from sentinel.cli.history import complete_option
from sentinel.cli.incidents import collect_incidents
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, plain
from sentinel.errors import ConfigError
from sentinel.web import json


@click.group()
def grafana() -> None:
    """Dashboards of runs, layers, ranks and Sentinel itself.

    \b
    Example:  sentinel grafana push --url http://grafana:3000 --dry-run
              sentinel grafana write dashboards/
    """


@grafana.command(short_help="Write dashboards and annotations to a server.")
@click.option("--url", envvar="GRAFANA_URL", required=True, help="Address of the server. [env: GRAFANA_URL]")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the token. [default: $GRAFANA_TOKEN]")
@click.option(
    "--prometheus", default="", help="Also make a data source for the Prometheus at this address, as seen from Grafana."
)
@click.option(
    "--run", callback=complete_option, help="Annotations of this run only: name or id. [default: all runs known here]"
)
@click.option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@json_option()
def push(url: str, token_file: Path | None, prometheus: str, run: str | None, dry_run: bool, as_json: bool) -> None:
    """Write a folder, dashboards, and annotations for incidents to a Grafana server, 10.0 or newer.

    Unchanged dashboards are not written again. A dashboard that was edited is reset; Grafana keeps its versions.
    The token is that of a service account with the role Editor; for --prometheus, Admin. There is no option for
    it, because other users of the machine can see the options of a command.

    Exit code 0; 2: wrong use, or Grafana refused something.

    \b
    Example:  GRAFANA_TOKEN=... sentinel grafana push --url http://grafana:3000
              sentinel grafana push --url https://grafana --token-file token \\
                  --prometheus http://prometheus:9090 --dry-run
    """
    from sentinel.toolkit.grafana.client import Grafana, read_token
    from sentinel.toolkit.grafana.push import push as pushed

    server = Grafana(url, read_token(token_file, os.environ.get("GRAFANA_TOKEN", "")))
    rows = []
    for row in pushed(server, collect_incidents(run), prometheus=prometheus, dry_run=dry_run):
        rows.append(row)
        if not as_json:
            word = row.done if row.done == "unchanged" or not dry_run else f"would be {row.done}"
            echo(f"{row.what:<12} {row.name}: {word}")
    if as_json:
        echo(json.text([msgspec.to_builtins(row) for row in rows]))


@grafana.command(short_help="Write the dashboards into a folder.")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@json_option()
def write(folder: Path, as_json: bool) -> None:
    """Write the dashboards into FOLDER, for provisioning from files.

    Exit code 0; 2: FOLDER cannot be written.

    \b
    Example:  sentinel grafana write /var/lib/grafana/dashboards/sentinel
    """
    from sentinel.toolkit.grafana.dashboards import files

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    written = [str(folder / name) for name in files()]
    echo(json.text(written) if as_json else "\n".join(map(plain, written)))
