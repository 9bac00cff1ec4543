"""JSON Schema of rule files, for editors: keys, words, shapes. What expressions mean is checked by `sentinel rules
check`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sentinel.engine import span
from sentinel.engine.observation import SCOPES
from sentinel.engine.rules.rule import ANNOTATIONS, SEVERITIES
from sentinel.engine.rules.rule_reader import ALERT, NAME, SLUG

_EXPRESSION = {"type": ["string", "number", "boolean"]}
"""YAML reads `expr: 1` as a number: `check` explains that mistake better."""


def schema(actions: Collection[str], evidence: Collection[str]) -> dict[str, Any]:
    """Return a schema (draft 2020-12) for a file of rules and overrides. `actions` and `evidence`: what a rule may
    name."""
    rule = _rule_properties(actions, evidence)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Sentinel rules",
        **_object(
            {
                "group": _matching(SLUG.pattern, "names the file's rules together"),
                "signals": {
                    "description": "metrics that the script logs itself: name and meaning",
                    "type": "object",
                    "propertyNames": {"pattern": _whole(NAME.pattern)},
                    "additionalProperties": {"type": "string"},
                },
                "rules": {"type": "array", "items": {"oneOf": [_alert(rule), _override(rule), _disable()]}},
            },
            required=["group", "rules"],
        ),
    }


def _alert(rule: dict[str, Any]) -> dict[str, Any]:
    named = {"alert": _matching(ALERT.pattern, "the rule's name, like LossSpike")}
    return _object({**named, **rule}, required=["alert", "expr"])


def _override(rule: dict[str, Any]) -> dict[str, Any]:
    named = {"override": _matching(ALERT.pattern, "a stock rule, of which only what is written here becomes another")}
    return _object({**named, **rule}, required=["override"]) | {"minProperties": 2}


def _disable() -> dict[str, Any]:
    named = {"override": _matching(ALERT.pattern, "a stock rule"), "disable": {"const": True}}
    return _object(named, required=["override", "disable"])


def _rule_properties(actions: Collection[str], evidence: Collection[str]) -> dict[str, Any]:
    lengths = rf"{span.STEPS.pattern}|{span.DURATION.pattern}"
    text = {"type": "string"}
    return {
        "scope": {"enum": list(SCOPES), "description": "what the condition is about"},
        "needs": {"type": "array", "items": text, "description": "metrics without which it is no rule for a run"},
        "let": {"type": "object", "propertyNames": {"pattern": _whole(NAME.pattern)},
                "additionalProperties": _EXPRESSION, "description": "names for expressions"},
        "expr": {**_EXPRESSION, "description": "the condition"},
        "members": {"type": "object", "minProperties": 1, "maxProperties": 1, "description": "members to name, too",
                    "propertyNames": {"enum": list(SCOPES[1:])}, "additionalProperties": _EXPRESSION},
        "for": _matching(rf"{lengths}|{span.SHARE.pattern}", "how long it must hold: 20 steps, 90s, 3 of 5 steps"),
        "warmup": _matching(lengths, "how long from the run's start nothing is judged: 200 steps, 10m"),
        "keep_firing": _matching(lengths, "how long it goes on firing after it was last true: 50 steps, 5m"),
        "keep_while": {**_EXPRESSION, "description": "a condition under which it goes on firing, too"},
        "rebase_after": _matching(span.STEPS.pattern, "how long baselines stand still at most: 500 steps"),
        "every": {"type": "integer", "minimum": 1, "maximum": 1000, "description": "every n-th of its samples will do"},
        "at": {"type": ["string", "array"], "items": text,
               "description": "one or some of its metrics: it looks at the samples of these alone"},
        "min_samples": {"type": "integer", "minimum": 1, "maximum": 100_000, "description": "so many will do"},
        "from_start": {"type": "boolean", "description": "whether its mistake is there from the first step on"},
        "severity": {"enum": list(SEVERITIES)},
        "problem": _matching(SLUG.pattern, "what it is a sign of: such alerts, close together, are one problem"),
        "consequence_of": {"type": "array", "items": _matching(SLUG.pattern, "a problem that brings it about")},
        "actions": {"type": "array", "items": {"enum": list(actions)}},
        "downgrade": {**_object({"when": _EXPRESSION, "severity": {"enum": list(SEVERITIES)},
                                 "actions": {"type": "array", "items": {"enum": list(actions)}}},
                                required=["when", "severity"]),
                      "description": "severity and actions where a condition holds as the rule fires"},
        "evidence": {"type": "array", "items": {"enum": list(evidence)}, "description": "what ranks are asked for"},
        "layers": {"type": "boolean", "description": "whether it matters which layers' gradients grew"},
        "annotations": _object({
            name: _matching(SLUG.pattern, "a section of docs/runbook.md") if name == "runbook" else text
            for name in ANNOTATIONS
        }),
    }  # fmt: skip


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def _matching(pattern: str, description: str) -> dict[str, Any]:
    return {"type": "string", "pattern": _whole(pattern), "description": description}


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"
