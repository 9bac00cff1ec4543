"""The findings of `sentinel doctor`, and their words (`findings.yaml`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec
import yaml

from sentinel.diagnose.causes import causes
from sentinel.rulebook.loader import stock_rules
from sentinel.text import rank_severity


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A problem that `sentinel doctor` found before the training meets it."""

    name: str
    """A short, stable name for scripts."""
    severity: str
    """The severity of the rule that finds the same mistake in a run. Without one: `critical`: it will not train as it
    is; `warning`: it costs, or fails under conditions; `info`: good to know."""
    what: str
    """The problem, with the numbers that show it."""
    why: str
    line: str
    """The line to write instead."""
    source: str
    """The documentation that says so."""


class FindingText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The words of a finding. `{names}` in them are replaced by facts."""

    what: str
    why: str
    severity: str = ""
    """The severity, if no rule has one."""
    line: str = ""
    source: str = ""
    cause: str = ""
    """`Alert/cause`, if a rule finds the same mistake later: the finding has that cause's remedy and source."""
    alert: str = ""
    """The alert alone, if the finding has words of its own."""
    downgraded: bool = False
    """Whether the finding has the rule's downgraded severity."""
    name: str = ""
    """The name of the finding, if it depends on the facts."""


_CONSEQUENCES = (
    ("optimizer-holds-others", "no-gradient"),
    ("no-gradient", "unused-parameters"),
    ("scaled-step", "loss-not-finite"),
    ("frozen-batch-norm-learns", "frozen-in-optimizer"),
)
"""Pairs of a finding and another one that follows from it and is left out."""


@functools.cache
def finding_texts() -> Mapping[str, FindingText]:
    """Return the words of each finding, by `name` or `name/variant`."""
    text = (resources.files("sentinel.toolkit.doctor") / "findings.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, FindingText])


def describe_finding(key: str, **facts: Any) -> DoctorFinding:
    """Return the finding `key` of `findings.yaml` with these facts."""
    text = finding_texts()[key]
    line, source = text.line, text.source
    if text.cause:
        alert, _, cause = text.cause.partition("/")
        line, source = causes()[alert][cause].remedy, causes()[alert][cause].source
    return DoctorFinding(
        name=text.name.format(**facts) or key.partition("/")[0],
        severity=text.severity or _find_severity(text),
        what=text.what.format(**facts),
        why=text.why.format(**facts),
        line=line.format(**facts),
        source=source.format(**facts),
    )


def _find_severity(text: FindingText) -> str:
    """Return the severity that the finding's rule gives it."""
    alert = text.alert or text.cause.partition("/")[0]
    rule = next(rule for rule in stock_rules() if rule.name == alert)
    return rule.downgrade.severity if text.downgraded and rule.downgrade is not None else rule.severity


def sort_findings(found: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Return the findings, the most severe first, each name once, and without consequences of others."""
    unique = {finding.name: finding for finding in reversed(list(found))}
    for cause, consequence in _CONSEQUENCES:
        if cause in unique:
            unique.pop(consequence, None)
    return sorted(reversed(unique.values()), key=lambda finding: -rank_severity(finding.severity))
