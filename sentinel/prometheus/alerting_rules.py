"""Write Sentinel's rules as Prometheus' alerting rules, for `sentinel rules export prometheus`.

    sentinel            the rules whose condition has a counterpart in PromQL: judged by Prometheus, at its scrapes
    sentinel-verdicts   one rule for all others: what the daemon found, which sees every step
    sentinel-itself     whether Sentinel works

The second rule covers whatever the first group does not, so that no alert fires twice. Prometheus does not
see what lies between two scrapes: a translated rule of a run also fires where the daemon's does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from sentinel.engine import Rule
from sentinel.engine.rules.rule import OVER
from sentinel.prometheus import promql
from sentinel.prometheus.metric_names import Scope
from sentinel.prometheus.promql import UntranslatableError

RUNBOOK = "docs/runbook.md"
_ENTITIES = {
    "run": "the run",
    "rank": "rank {{ $labels.rank }}",
    "gpu": "GPU {{ $labels.gpu }} of {{ $labels.hostname }}",
    "node": "{{ $labels.hostname }}",
}
_PLACES = {
    "run": "in run {{ $labels.run }}",
    "rank": "in run {{ $labels.run }}",
    "gpu": f"on {_ENTITIES['gpu']}",
    "node": f"on {_ENTITIES['node']}",
}
"""Scope -> where an alert is, as far as the labels of its series say. Runs may share a device, which has no `run`."""
_WHERE_TO_READ = "What, where, since when and what to do: sentinel incidents --run {{ $labels.run }}"
_FIELD = re.compile(r"\{\{|\}\}|\{([^{}:]*)(?::([^{}]*))?\}")
_WIDTH, _STR = 116, "tag:yaml.org,2002:str"

_ITSELF: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "SentinelDown", 'up{job="sentinel"} == 0', "2m", "warning",
        "the daemon at {{ $labels.instance }} does not answer Prometheus",
    ),
    (
        "SentinelRankSilent", "sentinel_rank_up == 0", "2m", "warning",
        "rank {{ $labels.rank }} of run {{ $labels.run }} has lost its connection to the daemon",
    ),
    (
        "SentinelHistoryFailing", "sentinel_history_failing == 1", "5m", "warning",
        "the history of run {{ $labels.run }} is not written: `sentinel status` says why",
    ),
    (
        "SentinelRulesNotRead", "sentinel_config_last_reload_successful == 0", "5m", "warning",
        "the daemon at {{ $labels.instance }} could not read a rule file; the rules stay as they were",
    ),
    (
        "SentinelNotificationsFailing", "increase(sentinel_notifications_given_up_total[15m]) > 0", "", "critical",
        "receiver {{ $labels.receiver }} was not told of an alert of run {{ $labels.run }}, and will not be",
    ),
    (
        "SentinelFaults", "increase(sentinel_daemon_faults_total[15m]) > 0", "", "warning",
        "the daemon at {{ $labels.instance }} had a fault of its own: its log has the traceback",
    ),
)  # fmt: skip
"""(alert, expression, for, severity, summary) of the rules about Sentinel itself."""


class _Dumper(yaml.SafeDumper):
    """Writes long text folded, as people write it."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_STR, text, style=">" if len(text) > _WIDTH - 30 else None)
)


def alerting_rules(rules: Iterable[Rule], *, as_json: bool = False) -> str:
    """Return a rule file of Prometheus, with the untranslated rules listed in comments. JSON, which is YAML too, has no
    comments."""
    made, left = list[dict[str, Any]](), list[tuple[str, str]]()
    for rule in rules:
        try:
            made.append(_translate_rule(rule))
        except UntranslatableError as reason:
            left.append((rule.name, str(reason)))
    groups = [{"name": "sentinel", "rules": made}] if made else []
    groups += [{"name": "sentinel-verdicts", "rules": [_verdicts([rule["alert"] for rule in made])]}]
    groups += [{"name": "sentinel-itself", "rules": [_own(*row) for row in _ITSELF]}]
    if as_json:
        return json.dumps({"groups": groups}, indent=2) + "\n"
    text = yaml.dump({"groups": groups}, Dumper=_Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
    return "\n".join(_header(left)) + "\n" + text


def _header(left: Sequence[tuple[str, str]]) -> list[str]:
    lines = ["# Written by `sentinel rules export prometheus`."]
    if left:
        lines += ["#", "# Prometheus cannot judge these; SentinelIncident passes the daemon's verdict on:"]
        lines += [f"#   {name}: {reason}" for name, reason in left]
    return lines


def _translate_rule(rule: Rule) -> dict[str, Any]:
    if rule.scope == "layer":
        raise UntranslatableError("only the layers that stand out are exported by name")
    scope: Scope = rule.scope
    expr = promql.condition(rule.expr, rule.lets, scope)
    held = rule.for_
    if held.of or held.span.steps > 1:
        raise UntranslatableError(f"`for: {held}` counts steps, and Prometheus sees one a scrape")
    if rule.warmup.steps or rule.warmup.seconds:
        raise UntranslatableError(f"`warmup: {rule.warmup}` counts from the run's start")
    if rule.downgrade is not None:  # it would page as critical for what the daemon takes for a warning
        raise UntranslatableError("`downgrade` is decided once, at the step at which the incident opens")
    needs = [promql.series(metric, scope) for metric in rule.needs]
    if needs:
        expr = " and ".join([f"({expr})", *needs])
    if has_verdict := scope == "run" and not held.span.seconds:
        expr += f' or max without (alert, severity) (sentinel_incidents_firing{{alert="{rule.name}"}} > 0)'
    found: dict[str, Any] = {"alert": rule.name, "expr": expr}
    if held.span.seconds:
        found["for"] = f"{held.span.seconds:.0f}s"
    if rule.keep_firing.seconds:
        found["keep_firing_for"] = f"{rule.keep_firing.seconds:.0f}s"
    found["labels"] = {"severity": rule.severity}
    found["annotations"] = {"summary": f"{rule.name} {_PLACES[scope]}"}
    for name, text in rule.annotations.items():
        if name == OVER:
            continue
        try:
            found["annotations"][name] = _text(text, scope, has_verdict=has_verdict)
        except UntranslatableError:  # with numbers that only the daemon has
            if scope in ("run", "rank"):
                found["annotations"].setdefault("description", _WHERE_TO_READ)
    if rule.runbook:
        found["annotations"]["runbook"] = f"{RUNBOOK}#{rule.runbook}"
    return found


def _verdicts(covered: Sequence[str]) -> dict[str, Any]:
    others = f'{{alert!~"{"|".join(covered)}"}}' if covered else ""
    return {
        "alert": "SentinelIncident",
        "expr": f"sentinel_incidents_firing{others} > 0",
        "labels": {"severity": "{{ $labels.severity }}"},
        "annotations": {
            "summary": "{{ $labels.alert }} in run {{ $labels.run }}",
            "description": _WHERE_TO_READ,
            "runbook": RUNBOOK,
        },
    }


def _own(alert: str, expr: str, held: str, severity: str, summary: str) -> dict[str, Any]:
    found: dict[str, Any] = {"alert": alert, "expr": expr}
    if held:
        found["for"] = held
    return found | {"labels": {"severity": severity}, "annotations": {"summary": summary}}


def _text(text: str, scope: Scope, *, has_verdict: bool) -> str:
    """Return an annotation as a template of Prometheus. Raises UntranslatableError where a field is neither a metric
    nor a word, or is a number of the incident: Prometheus has only those of now. `has_verdict`: the alert may be the
    daemon's, and the metrics be well again."""
    return _FIELD.sub(lambda found: _field(found, scope, has_verdict), text)


def _field(found: re.Match[str], scope: Scope, has_verdict: bool) -> str:
    if found[1] is None:
        return found[0][0]
    name = found[1].strip()
    if name in ("entity", "members"):
        return _ENTITIES[scope]
    if name in ("run", "step") and scope not in ("run", "rank"):
        raise UntranslatableError("a device has no run and no step")
    if name == "run":
        return "{{ $labels.run }}"
    if has_verdict or name == "first_step":
        raise UntranslatableError(f"{name} is a number of the incident")
    if name == "step":
        return _write_query("sentinel_step", scope, ".0f")
    return _write_query(promql.series(name, scope), scope, found[2] or "")


def _write_query(metric: str, scope: Scope, spec: str) -> str:
    """Write the newest value with the precision and the type of a number format. Go knows neither Python's other parts
    nor its `%`, which multiplies."""
    names = {"run": ("run",), "rank": ("run", "rank"), "gpu": ("UUID",), "node": ("hostname",)}[scope]
    labels, values = ",".join(f"{name}=%q" for name in names), " ".join(f"$labels.{name}" for name in names)
    precision, kind = re.search(r"((?:\.\d+)?)([eEfFgG%]?)$", spec).groups()  # type: ignore[union-attr]
    is_share = kind == "%"
    layout = f"%{precision}f%%" if is_share else f"%{precision}{kind or 'g'}"
    asked = f'printf "{"100 * " if is_share else ""}{metric}{{{labels}}}" {values} | query'
    return "{{ with " + asked + ' }}{{ . | first | value | printf "' + layout + '" }}{{ end }}'
