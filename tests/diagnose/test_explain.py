"""`sentinel explain`: the runbook, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.cli.explain import _without_tables, sections
from sentinel.errors import ConfigError
from sentinel.rulebook import loader

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"


def explained(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_package_has_the_runbook_of_the_docs() -> None:
    assert f"## rank-lost\n\n{sections()['rank-lost']}\n" in RUNBOOK.read_text()
    assert "- do: " in sections()["loss-spike"]
    assert "<!--" not in sections()["loss-spike"]
    assert {rule.runbook for rule in loader.stock_rules()} <= sections().keys()


@pytest.mark.parametrize("name", ["LossSpike", "loss-spike", "lossspike"])
def test_an_alert_is_known_however_it_is_written(name: str) -> None:
    text = explained(name)
    assert text.startswith("**LossSpike**, critical.")
    assert "sentinel/rules/stability.yaml" in text


def test_json_for_scripts() -> None:
    told = json.loads(explained("MemoryCreep", "--json"))
    assert (told["alert"], told["severity"], told["runbook"]) == ("MemoryCreep", "warning", "memory-creep")
    assert "losses.append(loss)" in told["text"]
    assert {rule["alert"] for rule in json.loads(explained("--json"))} == {r.name for r in loader.stock_rules()}


def test_a_users_rule_is_explained_by_its_annotations(private_places: Path) -> None:
    folder = private_places / "config" / "sentinel"
    folder.mkdir(parents=True)
    (folder / "sentinel.toml").write_text('[daemon]\nrules = ["mine.yaml"]\n')
    (folder / "mine.yaml").write_text(
        "group: mine\nrules:\n  - alert: TooWarm\n    expr: loss > 3\n    severity: info\n"
        "    annotations: {summary: 'loss {loss}', remedy: open a window}\n"
    )
    assert "open a window" in explained("TooWarm")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no such settings file; `sentinel init` writes one"),
        ("[daemon\n", "mine.toml:1: not TOML"),
        ('[daemon]\nrules = ["gone.yaml"]\n', "gone.yaml: no such rule file"),
    ],
)
def test_a_stock_rule_is_explained_without_settings(
    text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("SENTINEL_CONFIG", str(file))
    result = CliRunner().invoke(cli, ["explain", "RankLost"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.startswith("**RankLost**")
    assert result.stderr.startswith("sentinel: ")
    assert why in result.stderr
    with pytest.raises(ConfigError, match="no alert 'TooWarm'"):
        CliRunner().invoke(cli, ["explain", "TooWarm"], catch_exceptions=False)


def test_tables_become_lists_that_cut_nothing_off() -> None:
    table = "before\n\n| says | do |\n| --- | --- |\n| a | x |\n| b | y |\n\nafter"
    assert _without_tables(table) == "before\n\n- **a**\n  - do: x\n- **b**\n  - do: y\n\nafter"
    piped = "| says | do |\n| --- | --- |\n| a | `dmesg \\| grep oom` |"
    assert _without_tables(piped) == "- **a**\n  - do: `dmesg | grep oom`"
