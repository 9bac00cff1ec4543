"""Rules as Prometheus' alerting rules, checked and tested by promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.engine import load_rules
from sentinel.prometheus import promql
from sentinel.prometheus.alerting_rules import alerting_rules
from sentinel.prometheus.promql import UntranslatableError
from sentinel.rulebook import loader

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "prometheus"
RULES = FOLDER / "sentinel-rules.yaml"


def promtool(*arguments: str, **options: str) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package: prometheus)")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, cwd=FOLDER, **options)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("expr", "scope", "expected"),
    [
        ("stalled_seconds > 30", "rank", "sentinel_stalled_seconds > 30"),
        ("0 < loss < 1e-9", "run", "0 < sentinel_run_loss and sentinel_run_loss < 1e-09"),
        ("not isfinite(loss)", "run", "sentinel_run_loss != sentinel_run_loss or abs(sentinel_run_loss) == Inf"),
        ("isnan(loss) or isinf(loss)", "run",
         "sentinel_run_loss != sentinel_run_loss or abs(sentinel_run_loss) == Inf"),
        ("not loss > 3", "run", "sentinel_run_loss <= 3"),
        ("not (loss > 3 and grad_norm < 1)", "run", "sentinel_run_loss <= 3 or sentinel_run_grad_norm >= 1"),
        ("loss > 3 and (loss < 4 or loss > 5)", "run",
         "sentinel_run_loss > 3 and (sentinel_run_loss < 4 or sentinel_run_loss > 5)"),
        ("absent(loss_scale) and loss > 3", "run",
         "(max without (name, attempt) (sentinel_run_info) unless sentinel_run_loss_scale) and sentinel_run_loss > 3"),
        ("not absent(loss)", "rank", "sentinel_loss"),
        ("twice > abs(-loss)", "run", "(sentinel_run_loss * 2) > abs(-sentinel_run_loss)"),
        ("mean(step_seconds, 5m) > 2", "run", "avg_over_time(sentinel_run_step_seconds[300s]) > 2"),
        ("quantile(data_seconds / step_seconds, 0.9, 5m) > 0.5", "rank",
         "quantile_over_time(0.9, ((sentinel_data_seconds / sentinel_step_seconds))[300s:]) > 0.5"),
        ('across(step_seconds, "spread") > 1', "run",
         "(max without (rank) (sentinel_step_seconds) - min without (rank) (sentinel_step_seconds)) > 1"),
        ('across(grad_norm, "norm") > 1', "run", "sqrt(sum without (rank) ((sentinel_grad_norm) ^ 2)) > 1"),
        ("gpu_temperature_celsius > 90", "gpu", "sentinel_gpu_temperature_celsius > 90"),
        ("allocation_retries > 3", "run", "sentinel_run_allocation_retries_total > 3"),
        ("mean(waits, 5m) > 0.5", "rank",
         "avg_over_time(((sentinel_data_seconds / sentinel_step_seconds))[300s:]) > 0.5"),
        ("rss_bytes > 2147483648", "rank", "sentinel_rss_bytes > 2147483648"),
    ],
)  # fmt: skip
def test_an_expression_with_a_counterpart_is_translated(expr: str, scope: promql.Scope, expected: str) -> None:
    lets = {"twice": "loss * 2", "waits": "data_seconds / step_seconds"}
    assert promql.condition(expr, lets, scope) == expected


@pytest.mark.parametrize(
    ("expr", "reason"),
    [
        ("median(loss, 3) > 1", r"median\(loss, 3\) counts steps"),
        ("loss > past(loss)", r"past\(loss\) counts steps"),
        ("age(loss) == 0", r"age\(loss\) counts steps"),
        ('across(loss, "argmax") > 1', "names a rank"),
        ("slope(loss, 5m) > 1", "has no counterpart"),
        ("forward_seconds > 1", "forward_seconds of a rank is not exported"),
        ("absent(loss, 5)", "looks at single steps"),
        ('across(layer_grad_norm, "max") > 1', "layer_grad_norm of a layer is not exported"),
    ],
)
def test_an_expression_without_a_counterpart_says_why(expr: str, reason: str) -> None:
    with pytest.raises(UntranslatableError, match=reason):
        promql.condition(expr, {}, "rank")


@pytest.mark.parametrize(
    ("expr", "scope"),
    [
        ('step_seconds > 2 * across(step_seconds, "mean")', "rank"),
        ('across(gpu_temperature_celsius, "max") > 90 and loss > 3', "run"),
        ('gpu_temperature_celsius > across(gpu_temperature_celsius, "mean") + 20', "gpu"),
    ],
)
def test_across_is_refused_where_no_two_series_have_the_same_labels(expr: str, scope: promql.Scope) -> None:
    """Such an alert would never fire, and SentinelIncident would leave it out."""
    with pytest.raises(UntranslatableError, match="different labels"):
        promql.condition(expr, {}, scope)


def test_prometheus_reads_lets_in_windows_and_writes_shares_as_the_daemon_does(tmp_path: Path) -> None:
    text = """
group: mine
rules:
  - alert: Starved
    scope: rank
    let: {waits: data_seconds / step_seconds}
    expr: mean(waits, 1m) > 0.5
    severity: info
    annotations: {summary: "waits {data_seconds:6.1%} of a second, {step_seconds:,.2f} s a step"}
"""
    (tmp_path / "rules.yaml").write_text(alerting_rules(load_rules(text, "mine.yaml").rules))
    (tmp_path / "rules_test.yaml").write_text("""
rule_files: [rules.yaml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {series: 'sentinel_data_seconds{run="r", rank="1"}', values: "0.252+0x8"}
      - {series: 'sentinel_step_seconds{run="r", rank="1"}', values: "0.3+0x8"}
    alert_rule_test:
      - eval_time: 1m
        alertname: Starved
        exp_alerts:
          - exp_labels: {severity: info, run: r, rank: "1"}
            exp_annotations: {summary: "waits 25.2% of a second, 0.30 s a step"}
""")
    promtool("test", "rules", str(tmp_path / "rules_test.yaml"))


def test_an_alert_of_a_device_names_the_device_and_no_run() -> None:
    """Series of GPUs and hosts have no label `run`: several runs may share them."""
    scopes = {rule.name: rule.scope for rule in loader.load().rules}
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    texts = {rule["alert"]: rule["annotations"] for rule in rules if scopes[rule["alert"]] in ("gpu", "node")}
    assert {"GpuShared", "HostMemoryLow"} <= texts.keys()
    for alert, written in texts.items():
        assert "$labels.run" not in json.dumps(written), alert
        assert "{{ $labels.hostname }}" in written["summary"], alert


def test_promtool_takes_the_stock_rules_and_their_tests() -> None:
    promtool("check", "rules", RULES.name)
    promtool("test", "rules", RULES.with_stem("sentinel-rules_test").name)


def test_promtool_takes_the_rules_as_json_too(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["rules", "export", "prometheus", "--json"])
    (file := tmp_path / "rules.yaml").write_text(done.output)
    assert json.loads(file.read_text()) == yaml.safe_load(RULES.read_text())
    promtool("check", "rules", str(file))


def test_every_rule_is_translated_or_passed_on() -> None:
    rules = loader.load().rules
    content = yaml.safe_load(RULES.read_text())
    groups = {group["name"]: group["rules"] for group in content["groups"]}
    translated = {rule["alert"] for rule in groups["sentinel"]}
    comments = {line.split(":")[0].lstrip("# ") for line in RULES.read_text().splitlines() if line.startswith("#   ")}
    assert translated | comments == {rule.name for rule in rules}
    assert not translated & comments
    assert "NonFiniteLoss" in translated
    assert groups["sentinel-verdicts"][0]["expr"] == (
        'sentinel_incidents_firing{alert!~"' + "|".join(rule["alert"] for rule in groups["sentinel"]) + '"} > 0'
    )


def test_numbers_that_only_the_daemon_has_stay_out_of_the_text(tmp_path: Path) -> None:
    text = """
group: mine
rules:
  - alert: Slow
    scope: rank
    expr: mean(step_seconds, 5m) > 2
    for: 90s
    keep_firing: 10m
    severity: info
    annotations: {summary: "{median(step_seconds, 3):.1f} s", remedy: "{{wait}} {step_seconds:.0%}", runbook: slow}
"""
    file = tmp_path / "rules.yaml"
    file.write_text(alerting_rules(load_rules(text, "mine.yaml").rules))
    promtool("check", "rules", str(file))
    (rule,) = yaml.safe_load(file.read_text())["groups"][0]["rules"]
    assert (rule["for"], rule["keep_firing_for"], rule["labels"]) == ("90s", "600s", {"severity": "info"})
    assert rule["annotations"]["summary"] == "Slow in run {{ $labels.run }}"
    query = '{{ with printf "100 * sentinel_step_seconds{run=%q,rank=%q}"'
    assert rule["annotations"]["remedy"].startswith("{wait} " + query)


def test_a_rule_whose_severity_the_daemon_decides_is_left_to_the_daemon() -> None:
    text = """
group: mine
rules:
  - {alert: High, expr: loss > 20, severity: critical, downgrade: {when: not absent(loss_scale), severity: info}}
  - {alert: Higher, expr: loss > 30, severity: critical}
"""
    own, verdicts, _ = yaml.safe_load(alerting_rules(load_rules(text, "mine.yaml").rules))["groups"]
    assert [rule["alert"] for rule in own["rules"]] == ["Higher"]
    assert verdicts["rules"][0]["expr"] == 'sentinel_incidents_firing{alert!~"Higher"} > 0'


def test_the_command_prints_the_rules_and_names_a_mistake_in_a_file(tmp_path: Path) -> None:
    assert CliRunner().invoke(cli, ["rules", "export", "prometheus"]).output == RULES.read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text("group: mine\nrules: [{alert: High, expr: los > 1}]\n")
    result = CliRunner().invoke(cli, ["rules", "export", "prometheus", "--rules", str(bad)])
    assert "unknown metric 'los'" in str(result.exception)
