"""Files in addition to the stock ones: a rule changed in part, or switched off, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sentinel.engine import RUN, Evaluator, Observation, Rule, RuleFile, load_rules
from sentinel.errors import RuleError
from sentinel.rulebook import loader

BASE = """\
group: base
signals: {reward: mean reward}
rules:
  - alert: Drop
    needs: [reward]
    let:
      limit: 2 * mean(past(reward, 1), 3)
      low: limit - 1
    expr: reward < low
    warmup: 5 steps
    severity: critical
    actions: [evidence]
    evidence: [moments]
    layers: true
    annotations:
      summary: "reward {reward:.1f}, limit {limit:.1f}"
      runbook: drop
  - {alert: High, expr: loss > 5}
"""


def base() -> tuple[Rule, ...]:
    return load_rules(BASE, "base.yaml").rules


def loaded(rules: str) -> RuleFile:
    return load_rules(f"group: mine\nrules:\n{rules}", "mine.yaml", base=base())


def fault(rules: str) -> str:
    with pytest.raises(RuleError) as caught:
        loaded(rules)
    return str(caught.value)


def test_an_override_changes_only_its_keys() -> None:
    (old, _), (new,) = base(), loaded(
        "  - override: Drop\n    severity: info\n    let: {limit: 5, extra: low - 1}\n    expr: reward < extra\n"
        "    annotations: {remedy: 'wait, {extra}'}\n"
    ).rules  # fmt: skip
    assert (new.name, new.group, new.severity, new.expr) == ("Drop", "base", "info", "reward < extra")
    assert new.lets == {"limit": "5", "low": "limit - 1", "extra": "low - 1"}
    assert (new.warmup, new.actions, new.runbook, new.needs) == (old.warmup, old.actions, old.runbook, old.needs)
    assert (new.evidence, new.layers) == (("moments",), True)
    assert new.annotations == {**old.annotations, "remedy": "wait, {extra}"}
    assert (new.file, new.line) == ("mine.yaml", 3)
    assert new.text != old.text  # a state that was kept of the old one must not be taken for this

    evaluator = Evaluator([new], run="x")
    transitions = [evaluator.observe(Observation(seq, 0.0, {RUN: {"reward": 2.5}})) for seq in range(6)]
    assert [bool(found) for found in transitions] == [False] * 5 + [True]
    assert transitions[5][0].incident.annotations["remedy"] == "wait, 3.0"


def test_a_rule_is_switched_off() -> None:
    mine = loaded("  - {override: High, disable: true}\n  - {alert: Mine, expr: loss > 1}\n")
    assert (mine.disabled, [rule.name for rule in mine.rules]) == (("High",), ["Mine"])


FAULTS: Mapping[str, str] = {
    "  - override: Dorp\n    severity: info\n": "3:15: there is no rule 'Dorp' to override; did you mean 'Drop'?",
    "  - override: Drop\n": "3:5: this override changes nothing; add the keys that it changes, or `disable: true`",
    "  - {override: Drop, disable: true, severity: info}\n":
        "3:31: `disable: true` stands alone: take it out, or the other keys",
    "  - {override: Drop, disable: false}\n": "3:31: `disable: true` stands alone: take it out, or the other keys",
    "  - {override: Drop, disable: 1}\n": "3:31: expected disable: true or false, found a number (1)",
    "  - {override: Drop, alert: Drop}\n": "3:22: unknown key 'alert' in an override",
    "  - {override: Drop, severity: info}\n  - {override: Drop, severity: warning}\n":
        "4:16: alert 'Drop' is there twice; the first is in line 3",
    "  - {override: Drop, let: {limit: rewrd}}\n":
        "3:35: unknown metric 'rewrd'; did you mean 'reward'?; "
        "a metric that the script logs itself is declared under `signals:`",
    "  - {override: Drop, severity: bad}\n": "3:32: severity: 'bad' is not one of info, warning, critical",
}  # fmt: skip


@pytest.mark.parametrize("rules", FAULTS)
def test_mistakes_are_reported_at_their_place(rules: str) -> None:
    assert fault(rules).startswith(f"mine.yaml:{FAULTS[rules]}")


def test_a_mistake_that_the_change_makes_in_the_old_part_is_reported_there() -> None:
    """`low` uses `limit`, which is a condition now: the place is that of the stock file's line."""
    assert fault("  - {override: Drop, let: {limit: loss > 1}}\n").startswith("base.yaml:8:12: expected a number")


def test_the_rulebook_of_a_daemon(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "group: a\nrules:\n  - {override: LossSpike, keep_firing: 9 steps}\n"
        "  - {override: GradientSpike, disable: true}\n"
    )
    two.write_text("group: b\nrules:\n  - {override: LossSpike, severity: info}\n")
    book = loader.load([one, two])
    rules = {rule.name: rule for rule in book.rules}
    assert str(rules["LossSpike"].keep_firing) == "9 steps"
    assert rules["LossSpike"].severity == "critical"
    assert "GradientSpike" not in rules
    assert {rule.name for rule in loader.stock_rules()} - set(rules) == {"GradientSpike"}
    said = f"rules not loaded: {two}:1:1: alert LossSpike is in {one} too; rename one; all other rules apply"
    assert book.notes == (said,)


def test_a_file_that_is_not_there_is_named_alone(tmp_path: Path) -> None:
    gone, folder = tmp_path / "gone.yaml", tmp_path / "dir.yaml"
    folder.mkdir()
    assert loader.load([gone]).notes == (f"rules not loaded: {gone}: no such rule file or folder",)
    with pytest.raises(RuleError, match=f"^{folder}: cannot be read: Is a directory$"):
        loader.read(folder, ())
