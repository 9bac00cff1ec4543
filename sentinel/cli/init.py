"""`sentinel init`: settings and a folder of rules to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, plain
from sentinel.config import settings
from sentinel.errors import ConfigError
from sentinel.web import json

SETTINGS = """\
# Settings of Sentinel. Lines that are commented out show the defaults; receivers, routes and heartbeat are examples.
# Paths are relative to this file. Durations: 500ms, 90s, 5m, 2h, 1d.

[daemon]
rules = ["rules"]           # rule files and folders, beside the stock rules
# http = 9477               # port on 127.0.0.1; 0: any free one; "off": none
# listen = "127.0.0.1"      # "0.0.0.0": serve /metrics and health checks to other hosts, as in a pod
# file_sd = "targets"       # folder for the target file of Prometheus' service discovery
# external_url = "https://grafana.example/d/run?var-run={run_id}"   # every alert links to it

[links]                     # where people read more; messages show them. {run}, {run_id}, {host}, {user} are filled in
# runbook = "https://wiki.example/runbook"   # "#" and the alert's section follow
# page = "https://sentinel.example/{host}/"  # the live page, as people reach it
# report = "https://files.example/{run_id}.html"

[grouping]                  # a group is one problem of one run; the training terminal shows alerts at once
# wait = "5s"               # ranks that join within it are in the first message
# interval = "60s"          # least time between two messages about one group
# repeat = "4h"             # after this time an alert that still fires is sent again

[history]                   # one file per run; a daemon deletes ended runs when it starts
# max_age = "90d"           # since the run last wrote to it
# max_size = "20GB"         # of all your runs together; above it the oldest are deleted

[trackers]                  # incidents as marks in the run that your script has open there: docs/trackers.md
# wandb = false
# mlflow = false
# trackio = false
# tensorboard = false

[cluster]                   # jobs over several nodes, the same on all of them: docs/cluster.md
# address = "10.0.0.1:9478, 10.0.0.2:9478" # nodes 0, 1 ..., by global rank; without it they are found
# port = 0                  # without an address: of nodes 0 and 1; 0: any free one
# routers = ["router1:7447"] # in place of an address: Zenoh routers of the site; no node listens
# secret_file = "cluster.key" # 16 characters or more
# tls_ca = "ca.pem"         # with tls_certificate and tls_key: mutual TLS
# tls_certificate = "node.pem"
# tls_key = "node.key"

# Where alerts are sent. A secret is never written here: it is in an environment variable (url_env, token_env) or a file
# (url_file, token_file). Then: sentinel alerts test
#
# [[receivers]]
# name = "team"
# type = "slack"
# token_env = "SLACK_TOKEN"     # a bot's, with chat:write: one message per incident, edited as it changes
# channel = "#training"
#
# [[receivers]]
# name = "team-hook"
# type = "slack"
# url_file = "slack.url"        # an incoming webhook: a new message each time
# severities = ["critical", "warning"]
#
# [[receivers]]
# name = "oncall"
# type = "pagerduty"
# token_file = "pagerduty.key"  # routing key of an integration "Events API v2"
# url = "https://events.eu.pagerduty.com"   # of accounts in Europe
# rate_limit = "20 per 1h"      # messages above it wait, critical ones first
#
# [[receivers]]
# name = "am"
# type = "alertmanager"         # alerts as Prometheus sends them
# url = "http://127.0.0.1:9093"
#
# [[receivers]]
# name = "ops"
# type = "webhook"              # the format of Alertmanager's webhook
# url_env = "OPS_WEBHOOK"       # or url = "http://127.0.0.1:9000/hook", without a secret in it
# timeout = "10s"
#
# [[receivers]]
# name = "collector"
# type = "opentelemetry"        # log records: pip install 'training-sentinel[otlp]'
# url = "http://127.0.0.1:4318"
#
# [[receivers]]
# name = "mail"
# type = "apprise"              # mail, Teams, Discord, ntfy, ...: pip install 'training-sentinel[apprise]'
# url_file = "mail.urls"        # Apprise's URLs, one per line
#
# [[receivers]]
# name = "terminal"         # the training terminal shows all alerts; here: fewer
# type = "terminal"
# severities = ["critical"]
#
# The first route that matches an alert names its receivers; without routes every receiver gets it.
#
# [[routes]]
# rules = ["Loss*", "NonFinite*"]
# runs = ["prod-*"]             # names or ids
# severities = ["critical"]
# receivers = ["oncall"]
# continue = true               # look at the next route too
#
# [[routes]]
# receivers = ["team", "team-hook", "am", "ops", "collector", "mail"]
#
# A dead man's switch elsewhere gets a heartbeat while all runs are watched, and raises an alarm when it stops.
#
# [heartbeat]
# url_env = "HEARTBEAT_URL"
# interval = "60s"
#
# Metrics and spans for an OpenTelemetry collector; without url as OTEL_EXPORTER_OTLP_ENDPOINT says.
#
# [otlp]
# url = "http://127.0.0.1:4318"
# signals = ["metrics", "traces"]
# interval = "60s"
"""

RULE = """\
# One rule of your own. docs/rule-language.md has the language, docs/rules.md the signals.
#     sentinel rules check .      sentinel rules test .
group: mine
rules:
  - alert: GradientsFade
    scope: run                      # or rank, or layer: one incident, the ranks or layers are its members
    let:
      past_norm: median(past(grad_norm, 20), 100)
    expr: mean(grad_norm, 20) < 0.05 * past_norm
    for: 20 steps
    severity: info                  # or warning, or critical
    annotations:
      summary: "the gradient norm fell to {mean(grad_norm, 20):.2g}, from {past_norm:.2g}"
      remedy: "look for a learning rate that ran away, or for units that no longer activate"
"""

TEST = """\
rule_files: [example.yaml]
tests:
  - name: fires when the gradients fade
    input_series:
      - {series: grad_norm, values: "noise(1, 0.05, 150) 0.001x100"}
    expect:
      - {step: 140, alerts: []}
      - {step: 200, alerts: [{alert: GradientsFade, severity: info}]}

  - name: is silent as they slowly shrink
    input_series:
      - {series: grad_norm, values: "1-0.001x400"}
    fired: {}
"""


@click.command()
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path), metavar="[DIR]")
@json_option()
def init(directory: Path | None, as_json: bool) -> None:
    """Write commented settings, and a rule of your own with its test, into DIR. [default: the file that SENTINEL_CONFIG
    names, with the rule beside it; else ~/.config/sentinel]

    Files that exist already are not changed.

    Exit code 0; 2: they cannot be written.

    \b
    Example:  sentinel init
              sentinel init ./sentinel
    """
    file = settings.own_file() if directory is None else directory / settings.FILE
    rules = file.parent / "rules"
    files = {file: SETTINGS, rules / "example.yaml": RULE, rules / "example_test.yaml": TEST}
    made = {path: _write_new(path, text) for path, text in files.items()}
    if as_json:
        echo(json.text([{"file": str(path), "written": new} for path, new in made.items()]))
        return
    for path, new in made.items():
        echo(f"{plain(path)}: " + ("written" if new else "is there already, and stays as it is"))
    named = "" if directory is None else f"SENTINEL_CONFIG={plain(file)} "
    echo(
        "\nNext:\n"
        f"  1. name a receiver in {plain(file)}\n"
        f"  2. {named}sentinel alerts test\n"
        f"  3. sentinel rules check {plain(rules)}\n"
        f"  4. sentinel rules test {plain(rules)}\n"
        f"  5. {named}python train.py"
    )


def _write_new(path: Path, text: str) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if not path.is_file():
            raise ConfigError(f"{path}: is there, but no file; name a folder: sentinel init DIR") from None
        return False
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); name a folder: sentinel init DIR") from None
    return True
