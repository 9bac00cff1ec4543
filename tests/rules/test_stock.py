"""The stock rules: their own tests, what each must have, and what the docs say about the language."""

from __future__ import annotations

import itertools
import re
from importlib import resources
from pathlib import Path

import pytest

from sentinel.engine import Rule, load_rules, rules_of
from sentinel.engine.judging.judgement import STATES
from sentinel.engine.rules.rule import ANNOTATIONS, RULE_KEYS
from sentinel.engine.rules.template import WORDS
from sentinel.engine.ruletest import RuleTest, load_tests
from sentinel.rulebook import loader

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STOCK = Path(str(resources.files("sentinel.rules")))
FILES = sorted(path for path in STOCK.glob("*.yaml") if not path.stem.endswith("_test"))
LOADED = [load_rules(path.read_text(), f"rules/{path.name}") for path in FILES]
RULES = rules_of(LOADED)


def read_tests(path: Path) -> list[RuleTest]:
    return load_tests(path.read_text(), path.name, lambda name: (path.parent / name).read_text())


TESTS = {path.stem: read_tests(path.with_name(f"{path.stem}_test.yaml")) for path in FILES}


@pytest.mark.parametrize("test", [pytest.param(t, id=f"{file}: {t.name}") for file in TESTS for t in TESTS[file]])
def test_written_test(test: RuleTest) -> None:
    assert [f"line {failure.line}: {failure.message}" for failure in test.run()] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_has_what_a_person_needs(rule: Rule) -> None:
    assert {"summary", "remedy"} <= set(rule.annotations)
    assert not rule.annotations["remedy"][:1].isupper(), "it stands behind a label, as those of causes.yaml do"
    assert f"\n## {rule.runbook}\n" in (DOCS / "runbook.md").read_text()
    assert "evidence" in rule.actions
    assert rule.severity == "critical" or "rollback" not in rule.actions, "a warning undoes nothing"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_seen_to_fire_and_to_be_silent(rule: Rule) -> None:
    expected = [test.fired[1] for test in TESTS[Path(rule.file).stem] if test.fired is not None]
    assert any(rule.name in fired for fired in expected)
    assert any(rule.name not in fired for fired in expected)


def test_thresholds_have_their_source_beside_them() -> None:
    for path, loaded in zip(FILES, LOADED, strict=True):
        lines = path.read_text().splitlines()
        for rule in loaded.rules:
            assert lines[rule.line].strip().startswith("#"), f"{path.name}: {rule.name} needs a comment under its name"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_read_in_half_a_minute(rule: Rule) -> None:
    lines = (STOCK / Path(rule.file).name).read_text().splitlines()[rule.line :]
    own = itertools.takewhile(lambda line: not line.startswith("  - alert:"), lines)
    comments = sum(line.lstrip().startswith("#") for line in own)
    assert len(rule.lets) <= 5, f"{rule.name} has {len(rule.lets)} lets"
    assert comments <= 6, f"{rule.name} has {comments} lines of comment"


def test_the_language_is_documented() -> None:
    text = (DOCS / "rule-language.md").read_text()
    for name in (*RULE_KEYS, *ANNOTATIONS, *STATES, *(f"{{{word}}}" for word in WORDS)):
        assert f"`{name}`" in text, name


def test_the_example_of_the_docs_is_true() -> None:
    rules, override, tests = re.findall(r"```yaml\n(.*?)```", (DOCS / "rule-language.md").read_text(), re.DOTALL)
    assert [test.run() for test in load_tests(tests, "mine_test.yaml", lambda name: str(rules))] == [[]]
    changed = load_rules(override, "mine.yaml", base=loader.stock_rules())
    assert ([rule.name for rule in changed.rules], changed.disabled) == (["LossSpike"], ("GradientSpike",))
