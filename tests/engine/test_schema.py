"""The JSON Schema of rule files agrees with the loader, as far as shapes go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel.engine.rules.rule import ANNOTATIONS, OVERRIDE_KEYS, RULE_KEYS
from sentinel.engine.rules.schema import schema
from sentinel.rulebook import loader

SCHEMA = schema(loader.ACTIONS, loader.EVIDENCE)
DOCS = Path(__file__).parent.parent.parent / "docs"


def valid(value: Any, against: dict[str, Any]) -> bool:
    """Whether a value is valid by the keywords that the schema uses, as draft 2020-12 defines them."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    wanted = against.get("type")
    if wanted and not isinstance(
        value, tuple(kinds[name] for name in ([wanted] if isinstance(wanted, str) else wanted))
    ):
        return False
    if "enum" in against and value not in against["enum"]:
        return False
    if "const" in against and value is not against["const"]:
        return False
    if isinstance(value, str) and not re.search(against.get("pattern", ""), value):
        return False
    if isinstance(value, int) and not against.get("minimum", value) <= value <= against.get("maximum", value):
        return False
    if "oneOf" in against and sum(valid(value, one) for one in against["oneOf"]) != 1:
        return False
    if isinstance(value, list):
        return all(valid(item, against.get("items", {})) for item in value)
    return valid_object(value, against) if isinstance(value, dict) else True


def valid_object(value: dict[str, Any], against: dict[str, Any]) -> bool:
    properties, rest = against.get("properties", {}), against.get("additionalProperties", {})
    if not against.get("minProperties", 0) <= len(value) <= against.get("maxProperties", len(value)):
        return False
    if not all(valid(name, against.get("propertyNames", {})) for name in value):
        return False
    return set(against.get("required", ())) <= value.keys() and all(
        valid(item, properties[name]) if name in properties else rest is not False and valid(item, rest)
        for name, item in value.items()
    )


def test_stock_files_and_the_docs_example_are_valid() -> None:
    texts = [text for _, text in loader.stock()]
    texts += re.findall(r"```yaml\n(group:.*?)```", (DOCS / "rule-language.md").read_text(), re.DOTALL)
    assert len(texts) > len(loader.stock())
    for text in texts:
        assert valid(yaml.safe_load(text), SCHEMA), text[:200]


@pytest.mark.parametrize(
    "rule",
    [
        "{alert: A}", "{expr: loss > 1}", "{alert: a, expr: loss > 1}", "{alert: A, expr: loss > 1, severty: info}",
        "{alert: A, expr: loss > 1, severity: bad}", "{alert: A, expr: loss > 1, for: 5}", "{override: A}",
        "{alert: A, expr: loss > 1, for: 5 stepps}", "{alert: A, expr: loss > 1, actions: [reboot]}",
        "{override: A, disable: false}", "{override: A, disable: true, severity: info}", "{override: A, alert: A}",
        "{alert: A, expr: loss > 1, annotations: {sumary: x}}", "{alert: A, expr: loss > 1, rebase_after: 5m}",
        "{alert: A, expr: loss > 1, min_samples: 0}", "{alert: A, expr: loss > 1, every: 0}",
        "{alert: A, expr: loss > 1, members: {run: loss > 1}}", "{alert: A, expr: loss > 1, evidence: [tea_leaves]}",
        "{alert: A, expr: loss > 1, evidence: moments}", "{alert: A, expr: loss > 1, layers: some}",
    ],
)  # fmt: skip
def test_mistakes_are_seen(rule: str) -> None:
    assert not valid({"group": "g", "rules": [yaml.safe_load(rule)]}, SCHEMA)


def test_overrides_are_valid() -> None:
    for rule in ("{override: A, disable: true}", "{override: A, severity: info, let: {x: 1}}"):
        assert valid({"group": "g", "rules": [yaml.safe_load(rule)]}, SCHEMA), rule


def test_the_schema_knows_every_key() -> None:
    alert, override, disable = SCHEMA["properties"]["rules"]["items"]["oneOf"]
    assert alert["properties"].keys() == set(RULE_KEYS)
    assert override["properties"].keys() | disable["properties"].keys() == set(OVERRIDE_KEYS)
    assert alert["properties"]["annotations"]["properties"].keys() == set(ANNOTATIONS)
